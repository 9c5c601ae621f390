"""Seconds that work takes: on CUDA by events, without the time that its launches take the host; a twin for a CPU."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]
LONGEST = 0.15  # seconds that one measurement may take, where five repeats take no longer
MOST_REPEATS = 60
LEAST_REPEATS = 5


class Timer(Protocol):
    def seconds(self, calls: Sequence[Call]) -> float:
        """Median time of one of `calls`, which are alike but for the memory that they read, run in turn many times."""

    def replay_seconds(self, replay: Call) -> float:
        """Median time of `replay`, which launches a graph."""

    def kernel_seconds(self, replay: Call) -> float | None:
        """The sum of what the kernels of one `replay` take; None where the profiler cannot tell."""

    def synchronize(self) -> None:
        """Wait for all that was launched."""


class CudaTimer:
    def seconds(self, calls: Sequence[Call]) -> float:
        graph = self._graph(calls)
        return self.replay_seconds(graph.replay) / len(calls)

    def replay_seconds(self, replay: Call) -> float:
        """Repeats are launched without waiting, so that the device never waits for the host."""
        self._timings(replay, 2)
        guess = median(self._timings(replay, 3))
        return median(self._timings(replay, min(MOST_REPEATS, max(LEAST_REPEATS, int(LONGEST / guess)))))

    def kernel_seconds(self, replay: Call, repeats: int = 5) -> float | None:
        self.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            for _ in range(repeats):
                replay()
            self.synchronize()
        events = [event for event in profiled.key_averages() if event.device_type == DeviceType.CUDA]
        total = sum(event.self_device_time_total for event in events)  # microseconds
        return total * 1e-6 / repeats if total else None

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def _graph(self, calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
        """The first call may compile or allocate, which cannot be recorded."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph

    def _timings(self, replay: Call, repeats: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        events[0].record()
        for event in events[1:]:
            replay()
            event.record()
        self.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in zip(events, events[1:], strict=False)]


class CpuTimer:
    """Each call once, after one to warm up: what it gives is good for nothing but to try the code around it."""

    def seconds(self, calls: Sequence[Call]) -> float:
        calls[0]()
        return median(self._timing(call) for call in calls)

    def replay_seconds(self, replay: Call) -> float:
        return self._timing(replay)

    def kernel_seconds(self, replay: Call) -> float | None:
        return self._timing(replay)

    def synchronize(self) -> None:
        """A CPU has nothing under way."""

    @staticmethod
    def _timing(call: Call) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def make_timer(device: torch.device) -> Timer:
    return CudaTimer() if device.type == "cuda" else CpuTimer()
