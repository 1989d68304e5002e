"""Groups of ranks shard the model, and each group has a copy."""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hookline.engine import comm
from hookline.engine.parallel import FSDP2


class HSDP(FSDP2):
    def __init__(self, copies: int = 2):
        super().__init__()
        self.copies = copies

    def wrap(self, model, device):
        shape = (self.copies, comm.get_world_size() // self.copies)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("copies", "shards"))
        return fully_shard(model, mesh=mesh)
