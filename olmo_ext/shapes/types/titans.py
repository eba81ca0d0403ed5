"""Titans (arXiv 2501.00663): a memory that learns in context, alone (LMM) or with sliding-window attention (MAG, MAL).

A small MLP M per head is trained while the sequence is read, to map keys to values, with momentum and forgetting:

    S_t = eta_t S_{t-1} - theta_t grad || M(k_t) - v_t ||^2;   M_t = (1 - alpha_t) M_{t-1} + S_t;   y_t = M_t(q_t)

with gates alpha, eta, theta from the token. The gradients of a chunk are taken at the weights of its start, so a chunk
is a few large products (see `modules/titans_memory.py`). With a memory of depth 2 the chunk size is part of the
function, not of its schedule: it is fixed by the config, and decoding keeps it.

    lmm   out(memory(x) * sigmoid(gate(x)))                              the memory is the only mixer
    mag   out(norm(attention(x)) * sigmoid(norm(memory(x))))             both read x; no other output gate
    mal   out(attention(norm(memory_out(memory(x) * sigmoid(gate(x))))))  attention reads what the memory returns

Ours, where the paper is silent: a token sees its own write (`read: inclusive`); convolution, then SiLU, then the 2-norm
of q and k; also of v (`value_norm`: with the paper's v of any length, two of three small models went to NaN within 150
steps at a learning rate of 3e-3); theta is at most theta_max (1 - eta), theta_max is 1/chunk_size (more diverges); in
MAG both branches share the output projection; persistent tokens are written into the memory first, and are keys in
sight of every token in MAG's attention.

Our own code, because `NeuralMemory` of titans-pytorch 0.5.5 computes something else. What a token writes is read from
the end of its chunk on alone (in chunks of 16, token 5 changes what is returned for 5 and from 15 on), so it fails
`test_chunks_equal_the_token_by_token_recurrence`; and it cannot go on with several tokens from inside a chunk, so it
fails `test_decoding_with_the_carried_state_equals_the_full_forward`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from olmo_ext.shapes.layers import AttentionSpec
from olmo_ext.shapes.registry import AttentionType, ExportedModule, Matrix, built_in_module, register_attention
from olmo_ext.shapes.types.softmax import exported_heads
from olmo_ext.shapes.types.titans_sizes import TitansSizes

FORMS = ("lmm", "mag", "mal")
READS = ("inclusive", "exclusive")


def sizes_of(spec: AttentionSpec) -> TitansSizes:
    """The sizes of a spec that `check` has passed."""
    options = {**TitansType.options, **spec.options}
    heads = options["memory_heads"] or spec.n_heads
    head_dim = spec.width // heads
    conv = max(options["conv_width"], 1)
    return TitansSizes(
        form=options["form"],
        depth=options["memory_depth"],
        heads=heads,
        head_dim=head_dim,
        hidden=round(options["memory_ratio"] * head_dim),
        chunk_size=options["chunk_size"],
        window=options["window"] if options["form"] != "lmm" else 0,
        persistent_tokens=options["persistent_tokens"],
        conv_width=conv,
        momentum=options["momentum"],
        inclusive=options["read"] == "inclusive",
        output_gate=options["output_gate"] and options["form"] != "mag",
        theta_max=options["theta_max"] or 1.0 / options["chunk_size"],
        value_norm=options["value_norm"],
    )


@register_attention
class TitansType(AttentionType):
    """A neural memory in attention's place. The decoding state does not grow with the sequence."""

    name = "titans"
    honours_document_masks = False
    options = {
        "form": "lmm",
        "memory_depth": 2,
        "memory_ratio": 2.0,
        "memory_heads": 0,
        "chunk_size": 64,
        "window": 0,
        "persistent_tokens": 0,
        "conv_width": 4,
        "momentum": True,
        "read": "inclusive",
        "output_gate": True,
        "theta_max": 0.0,
        "value_norm": True,
    }

    def check(self, spec: AttentionSpec, d_model: int) -> str | None:
        options = {**self.options, **spec.options}
        for key, known in (("form", FORMS), ("read", READS), ("memory_depth", (1, 2))):
            if options[key] not in known:
                return f"{key} {options[key]!r} is none of {', '.join(map(str, known))}"
        if spec.n_heads < 1 or spec.head_dim < 1:
            return f"{spec.n_heads} heads of {spec.head_dim} are not positive"
        if options["chunk_size"] < 1:
            return f"chunk_size {options['chunk_size']} is not positive"
        for key in ("persistent_tokens", "conv_width", "memory_heads", "window", "theta_max"):
            if options[key] < 0:
                return f"{key} {options[key]} is negative"
        if options["form"] == "lmm":
            if options["window"]:
                return f"window {options['window']} belongs to the forms with attention, mag and mal"
            if spec.n_kv_heads != spec.n_heads:
                return f"n_kv_heads {spec.n_kv_heads} belongs to the forms with attention, mag and mal"
        else:
            if not options["window"]:
                return f"form {options['form']} needs a window, in tokens (half of the sequence is usual)"
            if spec.n_heads % spec.n_kv_heads:
                return f"{spec.n_heads} heads cannot share {spec.n_kv_heads} key-value heads evenly"
        heads = options["memory_heads"] or spec.n_heads
        if spec.width % heads:
            return f"memory_heads {heads} do not divide the width {spec.width}"
        if options["memory_depth"] == 2 and round(options["memory_ratio"] * (spec.width // heads)) < 1:
            return f"memory_ratio {options['memory_ratio']} leaves no hidden unit"
        return None

    def remarks(self, spec: AttentionSpec, sequence_length: int) -> list[str]:
        """A memory reads persistent tokens as well, so chunks are cut from both."""
        sizes = sizes_of(spec)
        remarks = []
        if sizes.window > sequence_length:
            remarks.append(
                f"window {sizes.window} is longer than max_sequence_length {sequence_length}:"
                " every token attends to all before it"
            )
        if sizes.chunk_size > sequence_length + sizes.persistent_tokens:
            remarks.append(
                f"chunk_size {sizes.chunk_size} is longer than max_sequence_length {sequence_length}:"
                " a sequence is one chunk, all of whose gradients are taken at the memory's initial weights"
            )
        return remarks

    def matrices(self, d_model: int, spec: AttentionSpec) -> list[Matrix]:
        """The memory's initial weights are among them: read once per token, they count as any product."""
        sizes = sizes_of(spec)
        width, hidden = sizes.width, sizes.hidden
        matrices = [(3 * width, d_model), (sizes.num_gates, d_model)]
        if sizes.conv_width > 1:
            matrices.append((3 * width, sizes.conv_width))
        if sizes.depth == 2:
            matrices += [(sizes.heads * hidden, sizes.head_dim), (sizes.heads * sizes.head_dim, hidden)]
        else:
            matrices.append((sizes.heads * sizes.head_dim, sizes.head_dim))
        if sizes.output_gate:
            matrices.append((width, d_model))
        if sizes.has_attention:
            matrices.append((spec.width + 2 * spec.kv_width, d_model))
        if sizes.form == "mal":
            matrices.append((d_model, width))
        return [*matrices, (d_model, spec.width)]

    def bias_parameters(self, d_model: int, spec: AttentionSpec, *, include_bias: bool) -> int:
        """The gates always have a bias, the memory itself never."""
        sizes = sizes_of(spec)
        if not include_bias:
            return sizes.num_gates
        memory = sizes.heads * (sizes.head_dim + (sizes.hidden if sizes.depth == 2 else 0))
        return sum(rows for rows, _ in self.matrices(d_model, spec)) - memory

    def table_parameters(self, d_model: int, spec: AttentionSpec) -> int:
        return sizes_of(spec).persistent_tokens * d_model

    def norm_features(self, d_model: int, spec: AttentionSpec) -> int:
        sizes = sizes_of(spec)
        return sizes.head_dim + {"lmm": 0, "mag": 2 * sizes.width, "mal": d_model}[sizes.form]

    def qk_norm_features(self, spec: AttentionSpec) -> int:
        """The memory's q and k have unit length anyway; the window's attention has OLMo's QK-norm."""
        return spec.width + spec.kv_width if sizes_of(spec).has_attention else 0

    def mixing_flops(self, d_model: int, spec: AttentionSpec, sequence_length: int, *, causal: bool = False) -> float:
        """Forward FLOPs per token beside the weight matrices: what learning in context costs.

        Counted on the chunk-wise form of the update (arXiv 2501.00663, section 3.2; the products are listed in
        `modules/titans_memory.py`). Per head of size D with hidden size P = r D and chunks of C, two FLOPs a
        multiply-accumulate: the pass at the chunk's start and its gradient 6 D P, reading the momentum 4 D P, the
        updates of weights and momentum 8 D P; inside the chunk 4 C D + 4 C P for the masked products and 2 C^2 for the
        decays. Over all heads and with the read (4 D P, a matrix product like others): 22 r width D + (4 + 4 r) C width
        + 2 heads C^2. Training is three times the forward pass, as everywhere: the backward pass goes through all of
        it. The causal figure halves what is quadratic in the chunk or the window. Persistent tokens are written into
        the memory before every sequence: their projections, writes and reads are spread over its tokens.
        """
        sizes = sizes_of(spec)
        chunk, dim = min(sizes.chunk_size, sequence_length), sizes.head_dim
        momentum = 1 if sizes.momentum else 0
        if sizes.depth == 2:
            cell = dim * sizes.hidden
            learning = (6 + 4 + 8 * momentum) * cell
            inside = chunk * (4 * dim + 4 * sizes.hidden)
        else:
            cell = dim * dim
            learning = (2 + 2 + 4 * momentum) * cell
            inside = chunk * 4 * dim
        inside += 2 * chunk * chunk * momentum
        flops = sizes.heads * (learning + inside * (0.5 if causal else 1.0))
        if sizes.persistent_tokens:
            projections = sizes.width * 3 * (d_model + (sizes.conv_width if sizes.conv_width > 1 else 0))
            written = flops + 2.0 * (projections + sizes.num_gates * d_model + sizes.memory_weights)
            flops += sizes.persistent_tokens / sequence_length * written
        if sizes.has_attention:
            window = min(sizes.window, sequence_length)
            attended = window - (window * (window - 1) / (2 * sequence_length) if causal else 0.0)
            flops += 4.0 * spec.width * (attended + (sizes.persistent_tokens if sizes.form == "mag" else 0))
        return float(flops)

    def cache_elements_per_token(self, spec: AttentionSpec) -> int:
        return 0

    def state_elements(self, d_model: int, spec: AttentionSpec) -> int:
        """Weights, momentum, the chunk's starting weights, the convolution's last inputs, the position, the window."""
        sizes = sizes_of(spec)
        copies = 1 + int(sizes.momentum) + int(sizes.chunk_size > 1)
        state = copies * sizes.memory_weights + 3 * sizes.width * (sizes.conv_width - 1) + 1
        return state + (2 * spec.kv_width * (sizes.window - 1) if sizes.has_attention else 0)

    def activation_elements(self, d_model: int, spec: AttentionSpec) -> int:
        """Projections, their convolution, SiLU and normalised values; per memory head the tensors of the chunk form;
        the weights at each chunk's start, spread over its tokens."""
        sizes = sizes_of(spec)
        width, heads = sizes.width, sizes.heads
        kept = 3 * width * (3 if sizes.conv_width > 1 else 2) + 3 * width
        hidden = heads * sizes.hidden if sizes.depth == 2 else 0
        kept += (8 if sizes.depth == 2 else 6) * width + 10 * hidden + 8 * heads * sizes.chunk_size
        kept += (1 + int(sizes.momentum)) * 2 * -(-sizes.memory_weights // sizes.chunk_size)
        kept += 3 * width + (2 * width if sizes.output_gate else 0)
        if sizes.has_attention:
            kept += super().activation_elements(d_model, spec) + 6 * width
        return kept

    def exported_modules(self, spec: AttentionSpec) -> list[ExportedModule] | None:
        memory = ("att_proj", "conv", "memory_gates", "memory_in", "memory_out", "head_norm", "persistent")
        others = ("out_gate", "window_norm", "memory_norm", "memory_proj", "between_norm")
        return [
            *(ExportedModule.whole(f"memory.{name}") for name in memory),
            *(ExportedModule.whole(name) for name in others),
            *exported_heads(spec, "window."),
            ExportedModule.whole("attn_out", "o_proj"),
        ]

    def exported_config(self, spec: AttentionSpec) -> dict[str, Any]:
        return {"attention_types": "titans", "titans": asdict(sizes_of(spec))}

    def tokens_to_compare(self, spec: AttentionSpec, *, least: int, most: int) -> int:
        """The end of a chunk that is not the first, and by which the window is full, if there is room for it."""
        sizes = sizes_of(spec)
        chunk, added = sizes.chunk_size, sizes.persistent_tokens
        end = -(-(max(least, chunk + 1, sizes.window) + added) // chunk) * chunk - added
        if end > most:
            end = (most + added) // chunk * chunk - added
        return end if end > 0 else most

    build = built_in_module
