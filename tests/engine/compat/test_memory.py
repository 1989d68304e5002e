import torch

from hookline.engine.compat.memory import retry_if_cuda_oom


def test_a_function_without_memory_is_called_again_and_then_on_the_cpu(log):
    calls = []

    @retry_if_cuda_oom
    def double(x, factor=2):
        calls.append((x.device.type, factor))
        if len(calls) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return factor * x

    assert double(torch.ones(2), factor=3).tolist() == [3, 3]
    assert calls == [("cpu", 3)] * 3
    assert "double: the GPU is out of memory; it runs on the CPU" in log.text
