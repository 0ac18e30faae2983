"""What stands in for a GPU in tests of the benchmarks: clocks that always show the same."""

import copy
from types import SimpleNamespace

from benchmarks.harness import batches, measure, timing
from benchmarks.harness.work import tensors


class FakeCapture:
    """Stands in for a CUDA graph where there is no GPU. A call that it holds several times is run
    once, for outputs of each."""

    def __init__(self, calls):
        self.calls, self.graph, self.outputs = calls, self, []
        for call, output in zip(calls, self._run(), strict=True):
            repeated = calls.index(call) < len(self.outputs)
            self.outputs.append(copy.deepcopy(output) if repeated else output)

    def _run(self):
        results = {call: call() for call in dict.fromkeys(self.calls)}
        return [results[call] for call in self.calls]

    def replay(self):
        for result, output in zip(self._run(), self.outputs, strict=True):
            for new, old in zip(tensors(result), tensors(output), strict=True):
                old.copy_(new)

    def device_us(self, before=None):
        return timing.Timing(4.0, 3.0, 5.0)


def pretend(monkeypatch, bench, *case_modules):
    """The flow of a CUDA case for ``bench``, over three input sets."""
    monkeypatch.setattr(measure, "Capture", FakeCapture)
    monkeypatch.setattr(batches, "_CAPTURED_CALLS", 6)  # each input set twice
    monkeypatch.setattr(measure, "host_us", lambda call: timing.Timing(6.0, 5.0, 7.0))
    kernels = [timing.Activity("kernel", 2.0)] * 2
    monkeypatch.setattr(measure, "device_activities", lambda call: kernels)
    for module in case_modules:
        monkeypatch.setattr(module, "rotating_sets", lambda *_: 3)
    bench.cold = object()
    bench.copies = SimpleNamespace(bytes_per_us=4e6, us=lambda moved: 2.0)
    return bench


def unpackaged(form, device):
    """Stands in for a package: the call that it is made of."""
    return form.case(form.exported).build(device).call
