"""One training step of a language model, groupwise against TRL 1.16: seconds and peak memory, on this machine's CPU.

A step is everything: 4 prompts x 8 completions are written, decoded, rewarded and trained on, in one optimiser step
(full fine-tuning, AdamW, no KL). Both sides write exactly ``NEW_TOKENS`` tokens per completion, so that the amount of
work is equal. Both processes live at the same time and take turns step by step; a ratio is the median over the pairs
of steps. TRL runs without gradient checkpointing (its default is slower). Both run at their fastest micro-batch, and
TRL in bfloat16 at the faster of autocast and bfloat16 weights; ``--tune 2 4 8 16`` finds these again. Memory is the
peak over a step above what the process held with the model loaded, at the same micro-batch on both sides, in processes
that run alone.

    python -m venv .venv-text
    .venv-text/bin/pip install -c constraints.txt -e '.[text]' -r benchmarks/requirements_text.txt
    .venv-text/bin/python benchmarks/trl_speed.py                # all; or: --cases tiny float32 --steps 5
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

HERE = Path(__file__).parent
RESULT = HERE / "results" / "trl_speed.json"
PROMPTS, GROUP, NEW_TOKENS = 4, 8, 64
QUESTIONS = (
    "What is 12 + 7? Answer with a number.",
    "Name three animals that live in the sea, separated by commas.",
    "Write one short sentence about rain.",
    "Which is larger, 9 or 14? Explain in a few words.",
)


QUIET: dict[str, Any] = {
    "gradient_checkpointing": False, "use_cpu": True, "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "report_to": [],
}  # fmt: skip
"""Arguments of TRL for a run on a CPU that writes nothing."""


class Side(NamedTuple):
    """How one library runs a case."""

    precision: str
    """float32, bfloat16 (weights and all), or autocast (TRL's ``bf16=True``)."""
    rows: int
    """Completions in one forward and backward pass."""


class Case(NamedTuple):
    """What is trained, and the fastest settings of both sides, as ``--tune`` found them."""

    what: str
    model: str
    """``smollm2`` or ``tiny``."""
    prompt_tokens: int | None
    """Prompts are filled up to so many tokens."""
    ours: Side
    trl: Side
    threads: int | None = None
    """Of torch. None: one a core."""


CASES = {
    "tiny": Case("tiny random model: pure overhead", "tiny", None, Side("float32", 32), Side("float32", 32), 1),
    "float32": Case("SmolLM2-135M, float32", "smollm2", None, Side("float32", 16), Side("float32", 8)),
    "bfloat16": Case("SmolLM2-135M, bfloat16", "smollm2", None, Side("bfloat16", 16), Side("bfloat16", 4)),
    "prompt512": Case("SmolLM2-135M, 512-token prompt", "smollm2", 512, Side("float32", 16), Side("float32", 2)),
}  # fmt: skip
MEMORY = {"float32": 32, "bfloat16": 32}
"""Cases whose memory is compared, and at how many rows a micro-batch."""


# --- the two sides: each calls ``turn()`` before a step, and ``done()`` after it ---


def run_ours(case: Case, side: Side, folder: Path, turn: Callable[[], None], done: Callable[[int], None]) -> None:
    from groupwise.text.collector import text_rollout

    algorithm, tokenizer, prompts = algorithm_of(case, side, folder)
    for step in itertools.count():
        turn()
        rows = scored(prompts, written(algorithm.policy, prompts, step), tokenizer)
        algorithm.update(text_rollout(rows))
        done(sum(len(row.completion) for row in rows))


def algorithm_of(case: Case, side: Side, folder: Path) -> tuple[Any, Any, list[list[int]]]:
    """GRPO of the model in the folder, its tokenizer, and the prompts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import groupwise as gw
    from groupwise.config.policy import SamplingCfg
    from groupwise.speed.decoding import FastDecoder
    from groupwise.text.policy import CausalLM

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    prompts = prompt_tokens(case, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, side.precision))
    policy = CausalLM(model, SamplingCfg(max_new_tokens=NEW_TOKENS), eos_ids=())
    policy.decoder = FastDecoder()
    cfg = gw.GRPOCfg(
        group_size=GROUP,
        num_epochs=1,
        minibatch_size=None,
        micro_batch_size=micro_batch_tokens(side.rows, max(map(len, prompts))),
        optimizer={"name": "adamw", "eps": 1e-8},
        learning_rate=1e-6,
        max_grad_norm=1.0,
        objective={"old_log_prob": "recomputed"},
    )
    return gw.GRPO(cfg, policy), tokenizer, prompts


def written(policy: Any, prompts: list[list[int]], step: int) -> list[list[Any]]:
    """A group of completions for each prompt."""
    import torch

    from groupwise.text.generation import complete

    return complete(policy, prompts, torch.arange(PROMPTS * GROUP).view(PROMPTS, GROUP) + 1000 * step)


def scored(prompts: list[list[int]], groups: list[list[Any]], tokenizer: Any) -> list[Any]:
    """The rows of a rollout, with rewards of the decoded completions."""
    from groupwise.text.collector import TextRow

    texts = tokenizer.batch_decode([c.tokens for group in groups for c in group], skip_special_tokens=True)
    rewards = iter(reward(texts))
    return [
        TextRow(prompt, c.tokens, c.log_probs, next(rewards), c.stop == "eos", number)
        for number, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
        for c in group
    ]


def micro_batch_tokens(rows: int, prompt: int) -> int:
    """What ``micro_batch_size`` must be for so many rows to fit, the prompt of members counted once."""
    return -(-rows // GROUP) * prompt + rows * NEW_TOKENS


def run_trl(case: Case, side: Side, folder: Path, turn: Callable[[], None], done: Callable[[int], None]) -> None:
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    dtype = torch.bfloat16 if side.precision == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    num_tokens = 0

    def score(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        nonlocal num_tokens
        num_tokens = sum(map(len, completion_ids))
        return reward(completions)

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            turn()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            done(num_tokens)

    args = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=side.rows,
        gradient_accumulation_steps=PROMPTS * GROUP // side.rows,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        generation_kwargs={"min_new_tokens": NEW_TOKENS},
        loss_type="dapo",
        learning_rate=1e-6,
        max_grad_norm=1.0,
        max_steps=1_000_000,
        bf16=side.precision == "autocast",
        **QUIET,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=score,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": prompt_texts(case, tokenizer)}),
        processing_class=tokenizer,
        callbacks=[Turns()],
    )
    trainer.train()


def reward(texts: list[str]) -> list[float]:
    """Cheap, and never equal within a group."""
    return [len(set(text)) + 1e-3 * number for number, text in enumerate(texts)]


def prompt_texts(case: Case, tokenizer: Any) -> list[str]:
    """What TRL tokenizes: the same tokens that ``prompt_tokens`` gives."""
    return [tokenizer.decode(tokens) for tokens in prompt_tokens(case, tokenizer)]


def prompt_tokens(case: Case, tokenizer: Any) -> list[list[int]]:
    if case.model == "tiny":
        return [[5 + n, 6, 7, 8 + n] for n in range(PROMPTS)]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in QUESTIONS
    ]
    prompts: list[list[int]] = [tokenizer(text)["input_ids"] for text in texts]
    if case.prompt_tokens is None:
        return prompts
    filler = tokenizer(" The sea is deep and the wind is cold." * 100)["input_ids"]
    return [filler[: case.prompt_tokens - len(prompt)] + prompt for prompt in prompts]


def make_tiny(folder: Path) -> None:
    """A random model of two layers and forty words, with its tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {"<pad>": 0, "<unk>": 1, "<bos>": 2, "<eos>": 3} | {f"t{i}": i for i in range(4, 40)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=40, pad_token_id=0, bos_token_id=2, eos_token_id=3, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)


# --- a worker: one side in a process of its own, which takes its turns from stdin ---


def work(name: str, case: Case, side: Side, folder: Path) -> None:
    import torch
    import transformers

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print goes elsewhere
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(case.threads or len(os.sched_getaffinity(0)))
    start = held = 0.0

    def turn() -> None:
        nonlocal start, held
        held = held or memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        say(answers, ready=True)
        if not sys.stdin.readline():
            os._exit(0)
        start = time.perf_counter()

    def done(tokens: int) -> None:
        say(answers, seconds=time.perf_counter() - start, tokens=tokens, mebibytes=memory("VmHWM") - held)

    {"ours": run_ours, "trl": run_trl}[name](case, side, folder, turn, done)


def memory(field: str) -> float:
    """MiB of this process: VmRSS (now) or VmHWM (peak)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def say(stream: TextIO, **fields: Any) -> None:
    stream.write(json.dumps(fields) + "\n")
    stream.flush()


class Worker:
    """A side that waits for its turns."""

    def __init__(self, name: str, case: str, side: Side, folder: Path) -> None:
        command = [sys.executable, __file__, "--worker", name, case, side.precision, str(side.rows), str(folder)]
        pipe = subprocess.PIPE
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  as long as the worker lives
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log, text=True)
        self._answer()

    def step(self) -> dict[str, float]:
        assert self._process.stdin
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        numbers = self._answer()
        self._answer()  # ready again
        return numbers

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"a worker has failed:\n{self._log.read()[-3000:]}")
        answer: dict[str, float] = json.loads(line)
        return answer


# --- what is measured ---


def compare(name: str, folder: Path, steps: int) -> dict[str, Any]:
    """Seconds of both sides, in turns, after a step each that does not count."""
    case = CASES[name]
    workers = {key: Worker(key, name, side, folder) for key, side in (("ours", case.ours), ("trl", case.trl))}
    pairs = [{key: worker.step() for key, worker in workers.items()} for _ in range(steps + 1)][1:]
    for worker in workers.values():
        worker.close()
    assert len({pair[key]["tokens"] for pair in pairs for key in pair}) == 1, "the sides wrote unlike many tokens"
    ratios = [pair["ours"]["seconds"] / pair["trl"]["seconds"] for pair in pairs]
    return {
        "what": case.what,
        "settings": {"ours": case.ours._asdict(), "trl": case.trl._asdict()},
        "tokens": pairs[0]["ours"]["tokens"],
        "seconds": {key: statistics.median(pair[key]["seconds"] for pair in pairs) for key in workers},
        "pairs": [{key: pair[key]["seconds"] for key in pair} for pair in pairs],
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }


def peak(key: str, name: str, side: Side, folder: Path) -> float:
    """MiB over the second step, which has the optimiser's state."""
    worker = Worker(key, name, side, folder)
    worker.step()
    mebibytes = worker.step()["mebibytes"]
    worker.close()
    return mebibytes


def compare_memory(name: str, folder: Path, rows: int) -> dict[str, Any]:
    case = CASES[name]
    sides = {"ours": case.ours, "trl": case.trl}
    found = {key: peak(key, name, side._replace(rows=rows), folder) for key, side in sides.items()}
    return {"rows": rows, "mebibytes": found, "ratio": found["ours"] / found["trl"]}


def tune(name: str, folder: Path, candidates: list[int]) -> None:
    """Print the seconds of a step at each micro-batch and in each precision that the sides can run."""
    case = CASES[name]
    precisions = {"float32": ("float32",), "bfloat16": ("bfloat16", "autocast")}[case.ours.precision]
    for key in ("ours", "trl"):
        for precision in precisions:
            if (key, precision) == ("ours", "autocast"):
                continue
            for rows in candidates:
                worker = Worker(key, name, Side(precision, rows), folder)
                worker.step()
                print(f"{name} {key} {precision} {rows} rows: {worker.step()['seconds']:.2f} s", flush=True)
                worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=3, help="pairs that count")
    parser.add_argument("--smollm2", type=Path, help="folder of smollm2.py; made if it is not there")
    parser.add_argument("--tune", nargs="+", type=int, help="only print how fast micro-batches of so many rows are")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--worker", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        name, case, precision, rows, folder = args.worker
        work(name, CASES[case], Side(precision, int(rows)), Path(folder))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folders = {"tiny": Path(scratch) / "tiny", "smollm2": args.smollm2 or Path.home() / ".cache" / "smollm2"}
        make_tiny(folders["tiny"])
        if any(CASES[name].model == "smollm2" for name in args.cases):
            import smollm2

            smollm2.make(folders["smollm2"])
        if args.tune:
            for name in args.cases:
                tune(name, folders[CASES[name].model], args.tune)
            return
        measure(args, folders)


def measure(args: argparse.Namespace, folders: dict[str, Path]) -> None:
    import torch
    import transformers
    import trl

    result: dict[str, Any] = {
        "what": f"a training step, {PROMPTS} prompts x {GROUP}, {NEW_TOKENS} new tokens each, no KL, full fine-tuning",
        "machine": {"cpus": len(os.sched_getaffinity(0)), "processor": platform.machine()},
        "versions": {module.__name__: module.__version__ for module in (torch, transformers, trl)},
        "time": {},
        "memory": {},
    }
    if args.out.exists() and (before := json.loads(args.out.read_text()))["versions"] == result["versions"]:
        # cases that are not measured now keep their figures
        result |= {kind: before[kind] for kind in ("time", "memory")}
    for name in args.cases:
        folder = folders[CASES[name].model]
        steps = args.steps * 5 if CASES[name].model == "tiny" else args.steps  # of a tenth of a second
        found = result["time"][name] = compare(name, folder, steps)
        ratio = found["ratio"]
        print(
            f"{found['what']:42} groupwise {found['seconds']['ours']:7.2f} s   TRL {found['seconds']['trl']:7.2f} s   "
            f"ratio {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
            flush=True,
        )
        if name in MEMORY and not args.no_memory:
            used = result["memory"][name] = compare_memory(name, folder, MEMORY[name])
            label, peaks = f"  peak memory, {used['rows']} rows at once", used["mebibytes"]
            print(
                f"{label:42} groupwise {peaks['ours']:5.0f} MiB   TRL {peaks['trl']:5.0f} MiB   "
                f"ratio {used['ratio']:.2f}",
                flush=True,
            )
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"-> {args.out}")


if __name__ == "__main__":
    main()
