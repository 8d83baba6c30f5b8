"""The committed reports of runs on real devices: sound, and of the kernels as they are today.

A kernel may change where no GPU is at hand, so a report that is behind is no failure: it is a skip that says for which
kernels, and how to make it again. A report that is damaged, or that records a kernel that was wrong, fails.
"""

import copy
import json
import re
from pathlib import Path

import mlx.core as mx
import pytest

from tests.kernels import report as reports
from tests.kernels.variants import rotate
from turbospark_mlx.custom_kernels.backends import Backend, compiler, host
from turbospark_mlx.custom_kernels.backends.kernel import Kernel

REPORTS = sorted((Path(__file__).parents[2] / "docs" / "parity").glob("*.json"))


def test_there_are_reports():
    assert REPORTS


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_report(path):
    report = json.loads(path.read_text(encoding="utf-8"))
    assert reports.faults(report) == []
    if behind := reports.stale(report):
        pytest.skip(
            f"{path.name} is behind for {', '.join(behind)}. On a machine with {report['device']}: "
            f"python benchmarks/kernels.py --parity-only --kernels {report['backend']} "
            f"--parity-report docs/parity/{path.name}"
        )


@pytest.fixture
def report():
    """A report about one variant of one kernel."""
    comparison = reports.Comparison("rotate", "float32 [1, 2, 3, 4]", ["rope T=float32"], 1e-7, 1e-5)
    backend = Backend("host", "cpu", "a stand-in")
    return reports.document(backend, [comparison])


def test_a_sound_report_survives_its_file(report, tmp_path):
    reports.write(tmp_path / "r.json", report)
    assert json.loads((tmp_path / "r.json").read_text()) == report
    assert reports.faults(report) == []
    assert "rope" not in reports.stale(report)
    assert "rms_norm" in reports.stale(report)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda r: r["variants"][0].update(error=2e-5), "rotate of .* is over 1e-05"),
        (lambda r: r["variants"][0].update(error=float("nan")), "nan is over"),
        (lambda r: r["variants"][0].update(tolerance=1.0), "is over 1e"),
        (lambda r: r["variants"].clear(), "sources"),
        (lambda r: r["sources"].update(other="0"), "sources"),
        (lambda r: r.pop("variants"), "variants"),
        (lambda r: r.update(backend="abacus"), "backend"),
        (lambda r: r["variants"][0].pop("op"), "op"),
    ],
)
def test_faults_are_found(report, change, complaint):
    changed = copy.deepcopy(report)
    change(changed)
    (fault,) = reports.faults(changed)
    assert re.search(complaint, fault)


@pytest.mark.parametrize("backend", sorted(reports.SHIMS))
def test_a_fingerprint_is_of_the_body_the_headers_and_the_shims(backend, monkeypatch, tmp_path):
    kernel = reports.KERNELS["rms_norm"]
    before = reports.fingerprint(kernel, backend)
    assert reports.fingerprint(kernel, backend) == before
    assert reports.fingerprint(Kernel(kernel.name, kernel.inputs, kernel.outputs), backend) != before
    shim = tmp_path / "shim.h"
    shim.write_text(reports.SHIMS[backend].read_text() + "\n")
    with monkeypatch.context() as patch:
        patch.setitem(reports.SHIMS, backend, shim)
        assert reports.fingerprint(kernel, backend) != before
    other = {reports.fingerprint(reports.KERNELS[name], backend) for name in ("rms_norm", "add_rms_norm", "rope")}
    assert len(other) == 3


@pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler on this machine")
def test_wrong_results_are_told_from_right_ones(monkeypatch):
    """Launches that multiply by 1.01 what the host back end gives."""
    monkeypatch.setattr(reports, "variants", lambda backend: [rotate(backend, (1, 2, 3, 8), 4, mx.float32)])
    monkeypatch.setattr(reports, "awkward", lambda backend: [])
    right = Backend("host", "cpu", "", host.launch)
    wrong = Backend("host", "cpu", "", lambda call, inputs: [y * 1.01 for y in host.launch(call, inputs)])
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        (good,), (bad,) = (list(reports.compare(backend)) for backend in (right, wrong))
    finally:
        mx.set_default_device(device)
    assert good.good
    assert good.error < 1e-6
    assert not bad.good
    assert 0.009 < bad.error < 0.011
    assert good.launches == ["rope T=float32 PAIRS=4 START=0 DISTANCE=4 INTERLEAVED=False"]


@pytest.mark.skipif(not compiler.candidates(), reason="no C++ compiler on this machine")
def test_what_has_not_changed_is_not_run_again(monkeypatch):
    cases = [(mx.float32, 3), (mx.float32, 4)]
    monkeypatch.setattr(reports, "variants", lambda backend: [rotate(backend, (1, 2, n, 8), 4, t) for t, n in cases])
    monkeypatch.setattr(reports, "awkward", lambda backend: [])
    ran = []

    def launch(call, inputs):
        ran.append(call)
        return host.launch(call, inputs)

    backend = Backend("host", "cpu", "", launch)
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    try:
        report = reports.document(backend, list(reports.compare(backend)))
        assert reports.comparable(report, backend)
        known = reports.still_true(report)
        ran.clear()
        assert list(reports.compare(backend, known)) == [reports.Comparison(**row) for row in report["variants"]]
        assert not ran
        known.popitem()
        assert len(list(reports.compare(backend, known))) == 2
        assert len(ran) == 1
        report["sources"]["rope"] = "another"
        assert not reports.still_true(report)
    finally:
        mx.set_default_device(device)
