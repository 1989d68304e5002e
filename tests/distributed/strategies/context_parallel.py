"""Each rank has a part of the positions of every text; around attention, ranks exchange heads for positions."""

import torch
from torch.distributed import all_gather, all_to_all_single
from torch.nn.functional import scaled_dot_product_attention

from hookline.engine import comm
from hookline.engine.parallel import DDP


def parts(x, dim):
    return x.unflatten(dim, (comm.get_world_size(), -1)).movedim(dim, 0)


class Exchange(torch.autograd.Function):  # splits one dimension over the ranks, joins another
    @staticmethod
    def forward(ctx, x, split, join):
        ctx.back = join, split
        sent = parts(x, split).contiguous()
        received = torch.empty_like(sent)
        all_to_all_single(received, sent)
        return torch.cat(received.unbind(), join)

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, *ctx.back), None, None


# Torch's distributed.nn.functional.all_gather gave wrong gradients on gloo with torch 2.14.
class Gather(torch.autograd.Function):  # joins a dimension; all ranks compute the same loss of the result
    @staticmethod
    def forward(ctx, x, dim):
        ctx.dim, every = dim, [torch.empty_like(x) for _ in range(comm.get_world_size())]
        all_gather(every, x)
        return torch.cat(every, dim)

    @staticmethod
    def backward(ctx, grad):  # DDP averages over the ranks, and the gradient is their sum
        return comm.get_world_size() * parts(grad, ctx.dim)[comm.get_rank()], None


def attention(*inputs, **options):  # each (N, heads, T, head_size)
    inputs = (Exchange.apply(x, 1, 2) for x in inputs)
    return Exchange.apply(scaled_dot_product_attention(*inputs, **options), 2, 1)


class ContextParallel(DDP):
    data_rank, data_size = 0, 1  # all ranks have the same texts

    def wrap(self, model, device):
        if comm.get_world_size() == 1:
            return model
        for block in model.blocks:
            block.attention = attention  # a model of yours: call it in place of torch's
        model.blocks[0].register_forward_pre_hook(lambda block, inputs: parts(inputs[0], 1)[comm.get_rank()])
        model.register_forward_hook(lambda model, inputs, outputs: Gather.apply(outputs, 2))
        return super().wrap(model, device)
