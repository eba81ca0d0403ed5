"""The loss without logits is the full loss: its numbers, its gradients, and whatever wraps the model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from olmo_ext.base.errors import InputError
from olmo_ext.shapes.memory import LOSS_CHUNK
from olmo_ext.training.train import train
from olmo_ext.upstream.chunked_loss import IGNORED, chunked_cross_entropy, chunked_loss

FSDP = ("distributed_strategy=fsdp", "fsdp.wrapping_strategy=by_block")


def full_loss(hidden, head, labels, z_multiplier):
    logits = head(hidden).flatten(0, -2)
    labels = labels.flatten()
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    z_loss = z_multiplier * (logits.logsumexp(-1).pow(2) * (labels != IGNORED)).sum()
    return loss + z_loss, loss, z_loss


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("z_multiplier", [0.0, 1e-4, 0.1])
@pytest.mark.parametrize("tokens", [1, LOSS_CHUNK["cpu"] - 1, 2 * LOSS_CHUNK["cpu"], 2 * LOSS_CHUNK["cpu"] + 7])
def test_numbers_and_gradients_are_those_of_the_full_loss(tokens, z_multiplier, bias):
    head = nn.Linear(32, 515, bias=bias)
    hidden = (3 * torch.randn(1, tokens, 32)).requires_grad_()
    labels = torch.randint(0, 515, (1, tokens))
    labels[:, 1::5] = IGNORED
    results = []
    for compute in (full_loss, lambda h, m, y, z: chunked_loss(h, m, y, z_multiplier=z)):
        hidden.grad = None
        head.zero_grad()
        parts = compute(hidden, head, labels, z_multiplier)
        (parts[0] / 3).backward()
        results.append((parts, [hidden.grad, *(parameter.grad for parameter in head.parameters())]))
    (expected, gradients), (ours, own_gradients) = results
    for number, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(number, theirs, rtol=1e-6, atol=1e-6)
    for gradient, theirs in zip(own_gradients, gradients, strict=True):
        assert distance(gradient, theirs) <= 1e-6
    each = F.cross_entropy(head(hidden)[0], labels[0], ignore_index=IGNORED, reduction="none")
    torch.testing.assert_close(chunked_cross_entropy(hidden, head, labels)[0], each, rtol=1e-5, atol=1e-6)


def test_labels_that_are_all_ignored_give_zero_and_no_gradient():
    head, hidden = nn.Linear(8, 20, bias=False), torch.randn(5, 8, requires_grad=True)
    parts = chunked_loss(hidden, head, torch.full((5,), IGNORED), z_multiplier=1.0)
    parts[0].backward()
    assert [float(part) for part in parts] == [0.0, 0.0, 0.0]
    assert not hidden.grad.any() and not head.weight.grad.any()


def test_sums_stay_fp32_under_autocast():
    head, hidden = nn.Linear(64, 4096, bias=False), torch.randn(2000, 64, requires_grad=True)
    labels = torch.randint(0, 4096, (2000,))
    exact = float(full_loss(hidden, head, labels, 1e-4)[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, *_ = chunked_loss(hidden, head, labels, z_multiplier=1e-4)
        assert chunked_cross_entropy(hidden, head, labels).dtype == torch.float32
    assert loss.dtype == torch.float32 and float(loss) == pytest.approx(exact, rel=1e-3)
    loss.backward()
    assert head.weight.grad.dtype == hidden.grad.dtype == torch.float32


@pytest.fixture
def same_run(forked, on_ranks, config, metric_rows, tmp_path):
    """`same_run(ranks, *overrides)`: a run with the full loss and one with the chunked loss have the same numbers."""

    def compare(number: int, *overrides: str, **sections):
        runs = []
        for loss in ("full", "chunked"):
            folder = tmp_path / loss
            # A large eps: the update then follows the gradient instead of its sign, which rounding can turn.
            text = config(*overrides, f"loss={loss}", "optimizer.eps=0.1", "eval_interval=2", **sections)

            def child(rank: int = 0, text=text, folder=folder):
                return train(text, run_directory=folder)

            ended = on_ranks(number, child) if number > 1 else [forked(child)]
            assert [end.code for end in ended] == [0] * len(ended), ended
            runs.append((metric_rows(folder), load_file(folder / "checkpoints/step4/model.safetensors")))
        (rows, weights), (own_rows, own_weights) = runs
        assert own_weights.keys() == weights.keys()
        for key, tensor in weights.items():
            torch.testing.assert_close(own_weights[key], tensor, rtol=1e-5, atol=1e-7, msg=key)
        chosen = ("train/CrossEntropyLoss", "train/ZLoss", "optim/total_grad_norm", "eval/held-out/CrossEntropyLoss")
        for row, own in zip(rows, own_rows, strict=True):
            assert own["values"].keys() == row["values"].keys()
            for key in set(chosen) & set(row["values"]):
                assert own["values"][key] == pytest.approx(row["values"][key], rel=1e-5), key
        return rows

    return compare


Z_LOSS = ("softmax_auxiliary_loss=true", "auxiliary_loss_multiplier=1e-2")


@pytest.mark.parametrize("ranks, overrides", [
    (1, ()),
    (1, (*Z_LOSS, "device_train_microbatch_size=2")),
    (1, ("model.weight_tying=true", *Z_LOSS)),
    (1, ("model.include_bias=true",)),
    (1, ("activation_checkpointing=whole_layer",)),
    (1, ("model.ffn.type=hourglass", "model.ffn.num_sub_mlps=3", *Z_LOSS)),
    (1, (*FSDP,)),
    (2, (*Z_LOSS, "device_train_microbatch_size=2")),
    (2, (*FSDP, *Z_LOSS)),
    (2, ("distributed_strategy=fsdp", "fsdp.wrapping_strategy=by_block_and_size")),
    (2, (*FSDP, "model.weight_tying=true")),
])  # fmt: skip
def test_a_run_with_the_chunked_loss_is_the_run_with_the_full_loss(same_run, ranks, overrides):
    rows = same_run(ranks, *overrides)
    assert any(row["kind"] == "eval" for row in rows)


def test_masked_labels_do_not_count(same_run, tokens, tmp_path):
    import numpy as np

    random = np.random.default_rng(1)
    masks = []
    for name in ("a", "b"):
        mask = random.random((48, 16)) < 0.5
        mask.tofile(tmp_path / f"{name}.mask")
        masks.append(str(tmp_path / f"{name}.mask"))
    paths = [str(tokens / "a.bin"), str(tokens / "b.bin")]
    same_run(1, *Z_LOSS, data={"paths": paths, "label_mask_paths": masks, "memmap_dtype": "uint16"})


def test_scaled_logits_are_refused_by_name(config):
    with pytest.raises(InputError, match="loss: chunked beside model.scale_logits"):
        config("loss=chunked", "model.scale_logits=true")
    with pytest.raises(InputError, match="is none of full, chunked"):
        config("loss=fused")


def test_the_model_is_as_it_was_after_a_loss_and_after_an_error(config):
    from olmo_ext.upstream.chunked_loss import loss_in_place_of_logits
    from olmo_ext.upstream.shaped_model import build_model

    for tied in ("true", "false"):
        model = build_model(config(f"model.weight_tying={tied}"))
        ids = torch.randint(0, 100, (2, 8))
        before, names = model(ids).logits, list(model.state_dict())
        with pytest.raises(ZeroDivisionError), loss_in_place_of_logits(model, lambda hidden, head: 1 / 0):
            model(ids)
        assert torch.equal(model(ids).logits, before) and list(model.state_dict()) == names
        assert model.config.weight_tying is (tied == "true")
