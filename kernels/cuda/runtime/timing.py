"""Measures the time of work on the GPU."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import cupy

from kernels.cuda.runtime.device import Device

# A timing is the median of _SAMPLES samples of about _SAMPLE_MS each.
_SAMPLES, _SAMPLE_MS, _MAX_CALLS = 5, 1.0, 50


def milliseconds(device: Device, works: Sequence[Callable[[], None]]) -> list[float]:
    """The milliseconds of each of `works`.

    Many calls are captured in one graph, so that the host's time does not count. The samples of all works
    alternate, because the GPU's clock changes.
    """

    def captured(work: Callable[[], None], calls: int) -> Any:
        with device.stream:
            device.stream.begin_capture()
            for _ in range(calls):
                work()
            return device.stream.end_capture()

    def sample(graph: Any) -> float:
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record(device.stream)
        graph.launch(device.stream)
        end.record(device.stream)
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end))

    for work in works:  # loads its kernels, which a capture does not allow
        work()
    single = [captured(work, 1) for work in works]
    estimates = [min(sample(graph), sample(graph)) for graph in single]
    calls = [min(_MAX_CALLS, max(1, round(_SAMPLE_MS / max(ms, 1e-3)))) for ms in estimates]
    graphs = [captured(work, n) for work, n in zip(works, calls, strict=True)]
    samples = [[sample(graph) / n for graph, n in zip(graphs, calls, strict=True)] for _ in range(_SAMPLES)]
    return [statistics.median(times) for times in zip(*samples, strict=True)]
