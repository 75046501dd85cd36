"""The soak for a moment, and that it reports what it is for."""

import threading

import pytest
from helpers import one_thread  # noqa: F401

from certify import soak


def test_training_in_threads(device):
    found = soak.Trial(device.type, measured=False).one(1, 0)
    assert found["failures"] == [] and found["rounds"] >= 1


@pytest.mark.parametrize(
    "in_threads, serial, words",
    [(1.001, 1, "other bits"), (1.5, 1.5, "losses"), (None, 1, "ValueError: planted")],
    ids=["bits", "losses", "error"],
)
def test_a_wrong_result_is_reported(monkeypatch, in_threads, serial, words):
    trained = soak.Work.trained

    def changed(self, fused):
        losses, parameters = trained(self, fused)
        in_main = threading.current_thread() is threading.main_thread()
        factor = in_threads if not in_main else serial if fused else 1
        if factor is None:
            raise ValueError("planted")
        return [factor * loss for loss in losses], parameters

    monkeypatch.setattr(soak.Work, "trained", changed)
    work = [soak.Work(f"1 {k}", "cpu") for k in range(2)]
    failures = soak.Trial("cpu", measured=False).compared(work)
    assert len(failures) == 2 and all(words in text for text in failures), failures


def test_memory_that_grows_is_reported():
    trial, mib = soak.Trial("cpu", measured=False), 1 << 20
    assert trial.verdict({"memory": [(300 + k % 7) * mib for k in range(100)]}) == []
    wrong = trial.verdict({"memory": [(300 + k) * mib for k in range(100)]})
    assert wrong == ["memory grew from 349 to 375 MiB"]
