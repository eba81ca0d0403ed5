"""An exported folder is scored by lm-eval with a task whose data is local."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

pytest.importorskip("lm_eval", reason="pip install 'olmo-ext[hf]'")

TASK = """\
task: local_colours
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""


def test_lm_eval_scores_the_folder_without_network(exported, tmp_path):
    from olmo_ext.data.tokenizer import load_tokenizer
    from olmo_ext.training.load_model import load_model_from_run

    run, folder = exported("titans among attention")
    items = [
        {"question": f"def f{i}(x): return", "choices": [" x", " the folder", " None"], "answer": i % 3}
        for i in range(9)
    ]
    data = tmp_path / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in items))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "local_colours.yaml").write_text(TASK.format(data=data))
    arguments = ["--model", "hf", "--model_args", f"pretrained={folder},trust_remote_code=True,dtype=float32"]
    arguments += ["--tasks", "local_colours", "--include_path", str(tmp_path / "tasks"), "--device", "cpu"]
    arguments += ["--batch_size", "4", "--output_path", str(tmp_path / "out"), "--log_samples"]
    environment = {"HF_HOME": str(tmp_path / "hf")}
    import os

    result = subprocess.run(
        [sys.executable, "-m", "lm_eval", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())
    found = report["results"]["local_colours"]
    # The same by hand, with the OLMo model.
    model, config = load_model_from_run(run)
    tokenizer = load_tokenizer(config.tokenizer.identifier, eos_token_id=0)
    import torch

    right = 0
    for item in items:
        context = tokenizer.encode(item["question"])
        scores = []
        for choice in item["choices"]:
            whole = torch.tensor([tokenizer.encode(item["question"] + choice)])
            logits = model(whole).logits.log_softmax(-1)
            taken = whole[0, len(context) :]
            scores.append(logits[0, len(context) - 1 : -1].gather(1, taken[:, None]).sum().item())
        right += int(max(range(3), key=scores.__getitem__) == item["answer"])
    assert math.isclose(found["acc,none"], right / len(items), abs_tol=1e-9)
    assert report["n-samples"]["local_colours"]["effective"] == 9
