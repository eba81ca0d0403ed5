"""Hardware facts: sourced, overlaid by the user's file, found by device name."""

from __future__ import annotations

import pytest
import yaml

from olmo_ext.base.errors import InputError
from olmo_ext.base.nodes import load_hardware, peak_flops_of_device


def test_the_two_node_types_have_the_datasheets_figures():
    hardware = load_hardware()
    ada, b200 = hardware.node("rtx6000ada"), hardware.node("b200")
    assert (ada.gpu.memory, ada.gpu.peak_bf16, ada.gpu.peak_fp8) == (48e9, 364.25e12, 728.5e12)
    assert (b200.gpu.memory, b200.gpu.usable_memory, b200.gpu.peak_bf16) == (192e9, 180e9, 2.25e15)
    assert b200.gpus_per_node == 8 and b200.cpus_per_gpu == 14
    for gpu in hardware.gpus.values():
        assert "datasheet" in gpu.source
        assert gpu.peak_fp8 is None or 1.9 < gpu.peak_fp8 / gpu.peak_bf16 < 2.1


def test_a_device_is_found_by_its_name_and_a_slice_of_one_is_not():
    assert peak_flops_of_device("NVIDIA H200") == 989.5e12
    assert peak_flops_of_device("NVIDIA RTX 6000 Ada Generation") == 364.25e12
    assert peak_flops_of_device("NVIDIA H200 MIG 1g.18gb") is None
    assert peak_flops_of_device("cpu") is None
    assert peak_flops_of_device("NVIDIA B200 of tomorrow", node="b200") == 2.25e15


def test_the_users_file_wins_key_by_key_and_adds_types(tmp_path, monkeypatch):
    (tmp_path / "slurm").mkdir()
    changes = {
        "nodes": {
            "rtx6000ada": {"gpus_per_node": 4, "mfu": 0.41, "mfu_source": "measured"},
            "ours": {
                "gpu": "h200", "gpus_per_node": 2, "cpus_per_node": 16, "memory": "256e9", "mfu": 0.3,
                "mfu_source": "guess", "source": "us",
            },
        }
    }  # fmt: skip
    (tmp_path / "slurm/nodes.yaml").write_text(yaml.safe_dump(changes))
    monkeypatch.chdir(tmp_path)
    hardware = load_hardware()
    assert hardware.node("rtx6000ada").gpus_per_node == 4 and hardware.node("rtx6000ada").cpus_per_node == 64
    assert hardware.node("ours").gpu.name == "h200" and hardware.node("ours").memory == 256_000_000_000


@pytest.mark.parametrize("text", ["", "gpus:", "nodes:\n  # all is commented out\n", "gpus: ~\nnodes: null"])
def test_a_file_without_entries_changes_nothing(tmp_path, text):
    (tmp_path / "nodes.yaml").write_text(text)
    assert load_hardware(tmp_path / "nodes.yaml") == load_hardware()


@pytest.mark.parametrize("text", ["gpus: [b200]", "nodes: b200", "gpus: 7"])
def test_a_section_that_is_no_mapping_is_named(tmp_path, text):
    (tmp_path / "nodes.yaml").write_text(text)
    with pytest.raises(InputError, match=f"nodes.yaml, {text[:4]}s?: holds no"):
        load_hardware(tmp_path / "nodes.yaml")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": {"b200": {"gpu": "b300"}}}, "nodes.b200.gpu: unknown GPU 'b300'"),
        ({"nodes": {"b200": {"mfuu": 1}}}, "did you mean 'mfu'"),
        ({"nodes": {"b200": {"mfu": 35}}}, "nodes.b200.mfu: mfu 35 is a fraction"),
        ({"gpus": {"b200": {"peak_bf16": "fast"}}}, "gpus.b200.peak_bf16"),
        ({"gpus": {"x": {"memory": 1}}}, "gpus.x: 'device_names' is missing"),
        ({"gpu": {}}, "did you mean 'gpus'"),
    ],
)
def test_what_is_wrong_in_the_users_file_is_named(tmp_path, change, words):
    path = tmp_path / "nodes.yaml"
    path.write_text(yaml.safe_dump(change))
    with pytest.raises(InputError) as caught:
        load_hardware(path)
    assert words in str(caught.value) and "nodes.yaml" in str(caught.value)


def test_an_unknown_node_type_names_the_known_ones():
    with pytest.raises(InputError, match="known: b200, rtx6000ada"):
        load_hardware().node("v100")
