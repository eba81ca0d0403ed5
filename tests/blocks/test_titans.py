"""Titans in a model: causal, decoding with a carried state, padding, counts, the window against plain attention."""

from __future__ import annotations

import pytest
import torch

from olmo_ext.base.errors import InputError

HOURGLASS = {"type": "hourglass", "d_ff": 16, "num_sub_mlps": 2}
FORMS = {
    "lmm": {"type": "titans", "chunk_size": 5},
    "linear": {"type": "titans", "chunk_size": 4, "memory_depth": 1, "persistent_tokens": 3, "read": "exclusive"},
    "mag": {
        "type": "titans",
        "form": "mag",
        "window": 6,
        "chunk_size": 4,
        "persistent_tokens": 2,
        "n_kv_heads": 2,
        "memory_heads": 2,
    },
    "mal": {
        "type": "titans",
        "form": "mal",
        "window": 6,
        "chunk_size": 1,
        "momentum": False,
        "conv_width": 1,
        "theta_max": 0.1,
    },
    "mixed": {"type": ["softmax", "titans", "gated"], "chunk_size": 5},
}


@pytest.fixture(scope="module")
def long_tokens():
    return torch.randint(0, 62, (2, 23), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", FORMS)
def test_no_position_sees_a_later_token_chunk_edges_included(name, built, long_tokens):
    model = built(attention=FORMS[name], ffn=HOURGLASS).eval()
    with torch.no_grad():
        base = model(long_tokens).logits
        for position in range(long_tokens.shape[1]):
            changed = long_tokens.clone()
            changed[:, position] = (changed[:, position] + 1) % 62
            difference = (model(changed).logits - base).abs().amax(-1)
            assert position == 0 or difference[:, :position].max() == 0
            assert difference[:, position].min() > 0
            # What is read later depends on it: the memory has learned it.
            assert position > 16 or difference[:, -1].min() > 0


@pytest.mark.parametrize("norm_after", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_decoding_with_the_carried_state_equals_the_full_forward(name, norm_after, built, long_tokens):
    """A prompt that ends inside a chunk, single tokens, and several at once across the ends of chunks."""
    model = built(attention=FORMS[name], ffn=HOURGLASS, norm_after=norm_after).eval()
    with torch.no_grad():
        full = model(long_tokens).logits
        past, parts = None, []
        for start, end in [(0, 7), (7, 8), (8, 9), (9, 10), (10, 11), (11, 18), (18, 23)]:
            output = model(long_tokens[:, start:end], past_key_values=past, use_cache=True)
            past = output.attn_key_values
            parts.append(output.logits)
            assert past[0][0].size(-2) == end
    torch.testing.assert_close(torch.cat(parts, dim=1), full, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in FORMS if name != "mixed"])
def test_the_state_has_the_size_that_plan_says_and_does_not_grow(name, built, tiny, long_tokens):
    counts = tiny(attention=FORMS[name], ffn=HOURGLASS).counts
    model = built(attention=FORMS[name], ffn=HOURGLASS).eval()
    for length in (8, 23):
        caches = model(long_tokens[:, :length], use_cache=True).attn_key_values
        assert sum(key[0].numel() + state[0].numel() for key, state in caches) == counts.state_elements
    assert counts.kv_cache_elements_per_token == 0


@pytest.mark.parametrize("name", FORMS)
def test_olmos_generate_and_its_beams_continue_as_decoding_without_a_state_does(name, built, long_tokens):
    model = built(attention=FORMS[name], ffn=HOURGLASS, init_std=0.2).eval()
    prompt = long_tokens[:, :9]
    with torch.no_grad():
        generated = model.generate(prompt, max_steps=5).token_ids[:, 0]
        greedy = prompt
        for _ in range(5):
            greedy = torch.cat((greedy, model(greedy).logits[:, -1].argmax(-1, keepdim=True)), dim=1)
        expected = greedy[:, 9:]
        expected[(expected == 63).cumsum(dim=1) > 0] = 63
        assert torch.equal(generated, expected)
        # The best of several beams, against the same scores without a state.
        beams = model.generate(prompt, max_steps=4, beam_size=3)
        for row in range(2):
            for beam in range(3):
                text = torch.cat((prompt[row], beams.token_ids[row, beam]))[None]
                scores = model(text).logits.log_softmax(-1)[0, 8:-1]
                end = (beams.token_ids[row, beam] == 63).nonzero()
                length = int(end[0]) + 1 if len(end) else 4
                total = scores.gather(1, beams.token_ids[row, beam][:, None])[:length].sum()
                torch.testing.assert_close(beams.scores[row, beam], total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FORMS)
def test_padding_on_either_side_leaves_the_tokens_as_they_were(name, built, long_tokens):
    model = built(attention=FORMS[name], ffn=HOURGLASS, init_std=0.2).eval()
    short = long_tokens[:1, 4:]
    left, right = torch.ones_like(long_tokens), torch.ones_like(long_tokens)
    left[0, :4] = 0
    right[0, 19:] = 0
    shifted = long_tokens.clone()
    shifted[0, :19] = short[0]
    with torch.no_grad():
        alone, whole = model(short).logits[0], model(long_tokens).logits[1]
        for ids, mask, place in ((long_tokens, left, slice(4, 23)), (shifted, right, slice(0, 19))):
            found = model(ids, attention_mask=mask).logits
            assert found.isfinite().all()
            torch.testing.assert_close(found[0, place], alone, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(found[1], whole, rtol=1e-4, atol=1e-5)
        # Rows that stand at other places of their chunks go on decoding from there.
        generated = model.generate(long_tokens, attention_mask=left, max_steps=6).token_ids[:, 0].tolist()
        for row, prompt in ((0, short), (1, long_tokens[1:])):
            own = model.generate(prompt, max_steps=6).token_ids[0, 0].tolist()
            # Decoding ends when every row has ended.
            assert generated[row] == (own + 6 * [63])[: len(generated[row])] and len(own) <= len(generated[row])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("olmo", [{}, {"include_bias": True, "layer_norm_type": "default"}])
def test_counts_equal_the_built_model(name, olmo, tiny):
    from olmo_ext.upstream import build_model

    config = tiny(attention=FORMS[name], ffn=HOURGLASS, **olmo)
    model = build_model(config, device="meta")
    found = dict.fromkeys(("attention", "norm"), 0)
    matrices = 0
    for path, parameter in model.named_parameters():
        if "norm" in path or ".ln_f." in path:
            found["norm"] += parameter.numel()
        elif ".attention." in path or "att" in path:
            found["attention"] += parameter.numel()
            matrices += parameter.numel() if parameter.dim() == 2 else 0
    assert config.counts.attention == found["attention"]
    assert config.counts.norm == found["norm"]
    assert config.counts.attention_matrices == matrices
    assert config.counts.total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "options",
    [{}, {"memory_depth": 1}, {"momentum": False}, {"memory_ratio": 4.0}, {"persistent_tokens": 32, "conv_width": 1}],
)
def test_flops_are_those_of_the_products_that_run(options, built, tiny):
    """torch's own count of the forward pass; what the formula leaves out is of the order of the chunk."""
    from torch.utils.flop_counter import FlopCounterMode

    sizes = {"d_model": 64, "n_heads": 2, "max_sequence_length": 128, "n_layers": 1}
    attention = {"type": "titans", "chunk_size": 32, **options}
    model = built(**sizes, attention=attention, ffn=HOURGLASS).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(2, 128, dtype=torch.long))
    ours = tiny(**sizes, attention=attention, ffn=HOURGLASS).counts.forward_flops_per_token
    assert ours == pytest.approx(counter.get_total_flops() / (2 * 128), rel=0.01)


def test_cost_per_token_does_not_depend_on_the_length(tiny):
    flops = [
        tiny(attention=FORMS["lmm"], max_sequence_length=length).counts.forward_flops_per_token
        for length in (64, 4096, 65536)
    ]
    assert flops[0] == flops[1] == flops[2]


def naive_window(mixer, h, persistent, window):
    """Every query against every key in sight, one by one, fp64."""
    spec, module = mixer.spec, mixer.window
    q, k, v = module.by_head(*module.qkv(h))
    q, k = mixer.rotary_emb(q, k)
    _, extra_k, extra_v = module.by_head(*module.qkv(persistent[None]))
    outputs = torch.zeros(*q.shape, dtype=torch.float64)
    for head in range(spec.n_heads):
        shared = head * spec.n_kv_heads // spec.n_heads
        for t in range(h.shape[1]):
            seen = slice(max(0, t - window + 1), t + 1)
            keys = torch.cat((extra_k[:, shared].expand(len(h), -1, -1), k[:, shared, seen]), 1).double()
            values = torch.cat((extra_v[:, shared].expand(len(h), -1, -1), v[:, shared, seen]), 1).double()
            scores = (keys @ q[:, head, t, :, None].double())[..., 0] / spec.head_dim**0.5
            outputs[:, head, t] = (scores.softmax(-1)[:, None] @ values)[:, 0]
    return outputs.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("length", [1, 5, 6, 7, 12, 23])
def test_the_windows_blocks_equal_attention_over_the_last_tokens_and_the_persistent_ones(length, built):
    mixer = built(attention=FORMS["mag"], ffn=HOURGLASS).transformer.blocks[0].attention
    h, persistent = torch.randn(2, length, 32), torch.randn(2, 32)
    with torch.no_grad():
        angles = mixer.angles(None, start=0, end=length, device=h.device)
        attended, _ = mixer.window(h, angles=angles, persistent=persistent)
        torch.testing.assert_close(attended.double(), naive_window(mixer, h, persistent, 6), rtol=1e-5, atol=1e-6)


def test_a_window_as_long_as_the_sequence_is_softmax_attention(built):
    softmax = built(ffn=HOURGLASS).transformer.blocks[0].attention
    attention = {"type": "titans", "form": "mag", "window": 16, "chunk_size": 4}
    mixer = built(ffn=HOURGLASS, attention=attention).transformer.blocks[0].attention
    mixer.window.load_state_dict(softmax.state_dict(), strict=False)
    h = torch.randn(2, 16, 32)
    attended, _ = mixer.window(h, angles=mixer.angles(None, start=0, end=16, device=h.device))
    torch.testing.assert_close(softmax.attn_out(attended), softmax(h)[0])


def test_a_memory_with_step_zero_is_a_fixed_function_of_the_token(built):
    """No convolution, no forgetting, no step: the order of the past does not matter."""
    attention = {"type": "titans", "chunk_size": 4, "conv_width": 1, "theta_max": 1e-30}
    module = built(attention=attention, ffn=HOURGLASS).transformer.blocks[0].attention
    torch.nn.init.constant_(module.memory.memory_gates.bias[:4], -100.0)
    h = torch.randn(2, 12, 32)
    order = torch.randperm(12)
    torch.testing.assert_close(module(h)[0][:, order], module(h[:, order])[0])


def longest_weight(built, *, momentum, projection, **options):
    """Of a memory's entries after 2,048 random tokens, with the largest step and a given eta before its sigmoid."""
    attention = {"type": "titans", "chunk_size": 16, "memory_heads": 1, **options}
    memory = built(attention=attention, ffn=HOURGLASS).transformer.blocks[0].attention.memory
    torch.nn.init.constant_(memory.memory_gates.bias[1], 6.0)
    torch.nn.init.constant_(memory.memory_gates.bias[2], momentum)
    random = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(memory.att_proj.weight, std=projection, generator=random)
    with torch.no_grad():
        _, state = memory(torch.randn(1, 2048, 32, generator=random))
    return max(float(w.abs().max()) for w in state.memory.weights)


@pytest.mark.parametrize("projection", [0.25, 25.0])
@pytest.mark.parametrize("momentum", [-3.0, 0.0, 1.0, 3.0])
def test_whatever_gates_and_projections_learn_a_long_sequence_leaves_the_memory_finite(momentum, projection, built):
    """A step summed over a chunk and repeated by the momentum is theta C / (1 - eta), and has to stay below one; it
    is as long as the error, which has to be bounded too."""
    assert longest_weight(built, momentum=momentum, projection=projection) < 10


def test_values_of_any_length_are_what_the_norm_of_values_is_there_for(built):
    case = {"momentum": 0.0, "projection": 25.0}
    assert not longest_weight(built, **case, value_norm=False) < 100 * longest_weight(built, **case)


@pytest.mark.parametrize("name", FORMS)
def test_fine_grained_checkpointing_and_mixed_precision_keep_the_numbers(name, built, grads, tokens):
    from olmo.config import ActivationCheckpointingStrategy

    model = built(attention=FORMS[name], ffn=HOURGLASS)
    plain = grads(model, tokens)
    assert all(gradient.abs().max() > 0 for path, gradient in plain.items() if ".attention." in path)
    model.set_activation_checkpointing(ActivationCheckpointingStrategy.fine_grained)
    for path, gradient in grads(model, tokens).items():
        torch.testing.assert_close(gradient, plain[path])
    model.set_activation_checkpointing(None)
    with torch.no_grad():
        full = model(tokens).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = model(tokens).logits
    torch.testing.assert_close(half.float(), full, rtol=0.05, atol=0.05 * float(full.abs().max()))


def test_the_memory_works_in_fp32_under_autocast(built, monkeypatch):
    from olmo_ext.blocks import titans_layer

    seen = set()
    run = titans_layer.run_memory

    def spy(q, k, v, gates, memory, **options):
        seen.update(x.dtype for x in (q, k, v, gates.log_keep, gates.step, gates.log_momentum, *memory.weights))
        output, after = run(q, k, v, gates, memory, **options)
        seen.update(x.dtype for x in (output, *after.weights, *after.momentum))
        return output, after

    monkeypatch.setattr(titans_layer, "run_memory", spy)
    module = built(attention=FORMS["lmm"], ffn=HOURGLASS).transformer.blocks[0].attention
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(torch.randn(2, 7, 32))[0].dtype == torch.bfloat16
    assert seen == {torch.float32}


def test_what_a_memory_cannot_honour_is_refused(built, tokens):
    from olmo_ext.config.run_config import load_run_config

    model = built(attention=FORMS["lmm"], ffn=HOURGLASS)
    with pytest.raises(InputError, match="document"):
        model(tokens, doc_lens=torch.tensor([[8, 8], [4, 12]]), max_doc_lens=[8, 12])
    with pytest.raises(InputError, match="bias"):
        model(tokens, attention_bias=torch.ones(2, 1, 16, 16, dtype=torch.bool))
    section = {"vocab_size": 64, "embedding_size": 64, "eos_token_id": 1, "pad_token_id": 1, "attention": FORMS["lmm"]}
    with pytest.raises(InputError, match="generate_doc_lengths"):
        load_run_config({"model": section, "data": {"generate_doc_lengths": True}})


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"form": "mac"}, "lmm, mag, mal"),
        ({"memory_depth": 3}, "memory_depth 3"),
        ({"chunk_size": 0}, "chunk_size 0"),
        ({"window": 8}, "window 8 belongs"),
        ({"form": "mag"}, "needs a window"),
        ({"memory_heads": 5}, "do not divide"),
        ({"n_kv_heads": 2}, "n_kv_heads 2"),
        ({"read": "late"}, "inclusive, exclusive"),
        ({"windows": 8}, "did you mean 'window'"),
    ],
)
def test_a_wrong_option_is_named(options, word, tiny):
    with pytest.raises(InputError, match=word):
        tiny(attention={"type": "titans", **options})


def recalled(built, *, layers, steps, **options):
    """Share of values named right in the last steps: three key-value pairs, then the keys again in another order."""
    attention = {"type": "titans", "chunk_size": 4, **options}
    model = built(n_heads=2, n_layers=layers, init_std=0.05, attention=attention, ffn={"d_ff": 32}, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01)
    random = torch.Generator().manual_seed(0)
    shares = []
    for step in range(steps):
        keys = torch.rand(32, 16, generator=random).argsort(1)[:, :3]
        values = torch.randint(16, 32, (32, 3), generator=random)
        order = torch.rand(32, 3, generator=random).argsort(1)
        again = torch.stack([keys.gather(1, order), values.gather(1, order)], 2).flatten(1)
        text = torch.cat([torch.stack([keys, values], 2).flatten(1), again], 1)
        predicted, right = model(text).logits[:, 6::2], text[:, 7::2]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(predicted.flatten(0, 1), right.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 20)
        optimizer.step()
        shares.append((predicted.argmax(-1) == right).float().mean().item())
    return sum(shares[-10:]) / 10


@pytest.mark.parametrize("depth", [1, 2])
def test_a_memory_recalls_what_a_memory_that_cannot_learn_does_not(depth, built):
    task = {"layers": 1, "steps": 320, "memory_depth": depth}
    learning, frozen = recalled(built, **task), recalled(built, **task, theta_max=1e-30)
    # Three values are in sight of nothing but the memory: guessing among them is right in a third.
    assert learning > 0.75
    assert frozen < 0.45
