"""Bad data is named before step 1; moved data is the same data, data in another order is not."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from olmo_ext.base.errors import InputError
from olmo_ext.base.sections import EvaluatorConfig
from olmo_ext.data.fingerprint import compare_fingerprints, data_fingerprint, evaluation_fingerprints
from olmo_ext.data.shared_orders import orders_shared
from tests.data.helpers import make_values

Files = Callable[..., list[Path]]


def test_an_np_save_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "saved.npy"
    np.save(path, np.arange(500, dtype=np.uint32))
    with pytest.raises(InputError, match=f"{path}: has the header of np.save"):
        data_fingerprint(make_values([path]))


def test_uint32_read_as_uint16_is_refused(token_files: Files) -> None:
    (path,) = token_files(500)
    with pytest.raises(InputError, match="every second uint16 value is 0: these are tokens of uint32"):
        data_fingerprint(make_values([path], memmap_dtype="uint16"))


def test_uint16_read_as_uint32_is_beyond_the_vocabulary(token_files: Files) -> None:
    """Both widths in one list: the file of the wrong width is the one that is named."""
    good = token_files(500, folder="good")
    (bad,) = token_files(500, dtype="uint16", folder="bad")
    with pytest.raises(InputError, match=f"{bad}, offset .* is beyond the vocabulary"):
        data_fingerprint(make_values([*good, bad]))


def test_a_vocabulary_that_the_type_cannot_hold_is_refused(token_files: Files) -> None:
    values = make_values(token_files(500), memmap_dtype="uint16")
    values = dataclasses.replace(values, model=dataclasses.replace(values.model, vocab_size=100278))
    with pytest.raises(InputError, match="uint16 holds ids up to 65,535, the vocabulary has 100,278; uint32"):
        data_fingerprint(values)


def test_a_size_that_is_no_whole_number_of_tokens_is_refused(token_files: Files) -> None:
    (path,) = token_files(500)
    os.truncate(path, 1999)
    with pytest.raises(InputError, match=f"{path}: 1999 bytes are not a whole number of uint32"):
        data_fingerprint(make_values([path]))


@pytest.mark.parametrize("tokens", [0, 31])
def test_a_file_without_one_instance_is_named_with_its_tokens_and_what_is_needed(
    token_files: Files, tokens: int
) -> None:
    paths = token_files(500, 500)
    os.truncate(paths[1], 4 * tokens)
    with pytest.raises(InputError, match=f"{paths[1]}: {tokens} tokens of uint32, an instance needs 32"):
        data_fingerprint(make_values(paths, length=32))


def test_a_missing_file_is_named(token_files: Files) -> None:
    paths = token_files(500, 500)
    paths[1].unlink()
    with pytest.raises(InputError, match=f"{paths[1]}: cannot be read"):
        data_fingerprint(make_values(paths))


def test_remote_paths_are_sent_to_fetch() -> None:
    values = make_values()
    values = dataclasses.replace(values, data=dataclasses.replace(values.data, paths=["http://localhost/x.npy"]))
    with pytest.raises(InputError, match="data fetch"):
        data_fingerprint(values)


def test_moved_files_are_the_same_data(token_files: Files, tmp_path: Path) -> None:
    paths = token_files(5000, 700)
    before = data_fingerprint(make_values(paths))
    shutil.move(paths[0].parent, tmp_path / "elsewhere")
    after = data_fingerprint(make_values([tmp_path / "elsewhere" / path.name for path in paths]))
    assert compare_fingerprints(before, after) == []
    assert before["fingerprint"] == after["fingerprint"] and before["instances"] == 312 + 43


def test_another_order_of_the_files_is_named(token_files: Files) -> None:
    paths = token_files(5000, 700)
    before, after = data_fingerprint(make_values(paths)), data_fingerprint(make_values(paths[::-1]))
    assert before["fingerprint"] != after["fingerprint"]
    assert compare_fingerprints(before, after) == [
        "the files are the same in another order: number 0 was part-00.npy, now part-01.npy"
    ]


def test_a_file_cut_by_4_kib_is_named(token_files: Files) -> None:
    paths = token_files(5000, 7000)
    before = data_fingerprint(make_values(paths))
    os.truncate(paths[1], 28000 - 4096)
    assert compare_fingerprints(before, data_fingerprint(make_values(paths))) == [
        "file 1, part-01.npy, had 28000 bytes, now it has 23904"
    ]


def test_other_content_or_a_missing_file_is_named(token_files: Files) -> None:
    paths = token_files(5000, 7000, 5000)
    before = data_fingerprint(make_values(paths))
    assert compare_fingerprints(before, data_fingerprint(make_values(paths[:2]))) == [
        "the list had 3 files, now it has 2; part-02.npy is missing"
    ]
    tokens = np.memmap(paths[1], dtype=np.uint32, mode="r+")
    tokens[3] += 1
    tokens.flush()
    assert compare_fingerprints(before, data_fingerprint(make_values(paths))) == [
        "file 1, part-01.npy, has other content at the same size"
    ]


def test_settings_that_change_the_data_are_named(token_files: Files) -> None:
    paths = token_files(5000)
    before = data_fingerprint(make_values(paths))
    assert compare_fingerprints(before, data_fingerprint(make_values(paths, seed=7))) == [
        "order_seed was 6198, now it is 7"
    ]
    filtered = data_fingerprint(make_values(paths, instance_filter={"repetition_max_count": 32}))
    assert "instance_filter was None" in compare_fingerprints(before, filtered)[0]
    assert compare_fingerprints(before, data_fingerprint(make_values(paths, length=32)))
    assert len({fingerprint["fingerprint"] for fingerprint in (before, filtered)}) == 2


def test_evaluation_sets_have_fingerprints_by_label(token_files: Files) -> None:
    data = make_values(token_files(900, folder="validation")).data
    held_out = EvaluatorConfig(label="held-out", type="lm", data=data)
    downstream = EvaluatorConfig(label="piqa", type="downstream")
    values = dataclasses.replace(make_values(token_files(500)), evaluators=[held_out, downstream])
    assert list(evaluation_fingerprints(values)) == ["held-out"]
    missing = dataclasses.replace(data, paths=["data/eval/wikitext_103.npy"])
    values = dataclasses.replace(values, evaluators=[dataclasses.replace(held_out, data=missing)])
    with pytest.raises(InputError, match="no such file; `olmo-ext eval --prepare data/eval`"):
        evaluation_fingerprints(values)


def test_runs_of_a_sweep_that_share_an_order_are_found() -> None:
    assert orders_shared({(1, 0): 1, (2, 0): 1}) == []
    assert orders_shared({(1, 0): 2, (2, 0): 1}) == [((1, 1), (2, 0))]
    assert orders_shared({(1, 0): 1, (2, 0): 2}) == []
    assert orders_shared({(1, 0): 1, (4, 0): 1, (2, 2): 1}) == [((2, 2), (4, 0))]
    assert orders_shared({(6198, 0): 3, (6198, 1): 2}) == []
