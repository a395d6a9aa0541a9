"""The visible GPUs by NVML: here, that of the software GPU, compiled alone."""
import subprocess
from pathlib import Path

import pytest
from gluon_amp.cuda import devices

RECORD = Path(__file__).parents[1] / "software_gpu" / "record"
# What nvml.cc uses of other files, which record calls.
REST = """
#include "record.h"
#include <stdlib.h>
#include <string.h>
thread_local int t_device = 0;
int number(const char* name, int otherwise) {
  return getenv(name) ? atoi(getenv(name)) : otherwise;
}
int compute_capability(int device) {
  const char* text = getenv("RECORDING_GPU_SM");
  for (; device > 0; device--) text = strchr(text, ',') + 1;
  return atoi(text);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "rest.cc").write_text(REST)
    made = folder / "libnvidia-ml.so.1"
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", f"-I{RECORD}", "-o", made,
                    RECORD / "nvml.cc", folder / "rest.cc"], check=True)
    return made


@pytest.fixture()
def found(library, monkeypatch):
    """The capabilities that are visible with some GPUs and CUDA_VISIBLE_DEVICES."""
    def visible(capabilities, chosen=None, order=None):
        monkeypatch.setattr(devices, "_LIBRARY", str(library))
        monkeypatch.setenv("RECORDING_GPU_COUNT", str(len(capabilities)))
        monkeypatch.setenv("RECORDING_GPU_SM", ",".join(map(str, capabilities)))
        for name, value in (("CUDA_VISIBLE_DEVICES", chosen), ("CUDA_DEVICE_ORDER", order)):
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        return [gpu.capability for gpu in devices.visible().gpus]
    return visible


def test_all_gpus_are_visible_by_default(found):
    assert found([86, 90, 120]) == [86, 90, 120]
    told = devices.visible()
    assert (told.driver, told.cuda) == ("580.65.06", 13000)
    assert str(told.gpus[1]) == "recording GPU sm_90 (compute capability 9.0)"


@pytest.mark.parametrize(("chosen", "expected"), [
    ("", []), ("-1", []), ("none", []), ("0", [86]), ("2,0", [120, 86]), ("1,-1,0", [90]),
    ("1,7,0", [90]), (" 1 , 2 ", [90, 120]), ("1,1", [90]),
    ("GPU-10000000-recording", [90]), ("GPU-1", [90]), ("GPU-", []), ("GPU-9", []),
    ("MIG-20000000-instance", [120]), ("MIG-GPU-1/0/1", [90]), ("MIG-70000000-absent", []),
    ("GPU-2,0", [120, 86])])
def test_chosen_gpus_are_visible(chosen, expected, found):
    assert found([86, 90, 120], chosen, "PCI_BUS_ID") == expected


def test_index_in_order_of_speed_may_mean_any_model(found):
    assert found([86, 90], "0") == [86, 90]
    assert found([90, 90], "0") == [90]
    assert found([86, 90], "GPU-0") == [86]
    assert found([86, 90], "") == []


def test_missing_or_failing_driver_is_an_error(found, library, monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "_LIBRARY", "libnvidia-ml-absent.so.1")
    with pytest.raises(OSError, match=r"libnvidia-ml-absent\.so\.1"):
        devices.visible()
    (tmp_path / "failing.c").write_text("int nvmlInit_v2(void) { return 18; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "nvml.so",
                    tmp_path / "failing.c"], check=True)
    monkeypatch.setattr(devices, "_LIBRARY", str(tmp_path / "nvml.so"))
    with pytest.raises(OSError, match="nvmlInit_v2 fails with error 18"):
        devices.visible()
