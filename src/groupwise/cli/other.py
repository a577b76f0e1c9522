"""Other commands: ``config``, ``check-env``, ``plan``, ``demos``, ``serve`` and ``list``."""

import json
import shutil
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from groupwise import plugins
from groupwise.cli.options import Parser, count, parse_env, parse_options, words_of
from groupwise.config import json_schema, to_json
from groupwise.config import load as presets
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.config.run import EnvCfg, TextRunCfg, TextTaskCfg
from groupwise.errors import ConfigError, EnvError, UnknownNameError
from groupwise.system import show


def config_command(parser: Parser, argv: Sequence[str]) -> None:
    """Print all settings of a run as JSON, which train takes as a file.

      groupwise config CartPole-v1 --algorithm ppo > my_run.json
      groupwise config my_run.json --algorithm.gamma 0.98
      groupwise config --schema                        JSON Schema, for your editor

    Options, as those of train:
      --preset NAME                       credit and objective of a paper; see: groupwise list
    """
    parser.add_argument("--schema", action="store_true")
    options, rest = parser.parse_known_args(argv)
    print(json.dumps(json_schema(), indent=2) if options.schema else to_json(parse_options(rest, parser)))


def check_env_command(parser: Parser, argv: Sequence[str]) -> int:
    """Check what an environment supports: shared starts of groups and their cost, randomness, spaces.
    Exit code 1: GRPO cannot train on it.

    Examples:
      groupwise check-env Ant-v5
      groupwise check-env Ant-v5 --env.kwargs '{"healthy_reward": 0.5}' --json
      groupwise check-env Mine-v0 --plugin my_env.py
      groupwise check-env guess/Number-v0 --plugin my_game.py --task.env-kwargs '{"most": 7}'
      groupwise check-env textarena:2048-v0
      groupwise check-env ALE/Pong-v5 --env.num-random-noops 30

    Options: --json, and settings of the environment:
    """
    parser.add_argument("--json", action="store_true")
    options, rest = parser.parse_known_args(argv)
    settings = [f"env.{name}" for name in EnvCfg.model_fields if name not in ("id", "num_envs")]
    if rest and plugins.is_text_env(rest[0]):
        cfg = parse_options(rest, parser, only=["task.env_kwargs", "task.start_mode", "task.max_turns"])
        assert isinstance(cfg, TextRunCfg)
        return _check_text_env(cfg.task, as_json=options.json)
    env = parse_env(rest, parser, only=settings)

    from groupwise.check import check_env

    report = check_env(env)
    show(json.dumps(report.to_dict()) if options.json else report)
    return int(report.training.value is None)


def _check_text_env(task: TextTaskCfg, *, as_json: bool) -> int:
    from groupwise.text.envs import check_text_env
    from groupwise.text.tool_env import make_text_env

    make = make_text_env(task)
    assert callable(make)
    try:
        report = check_text_env(make, task.start_mode, **task.changed("max_turns"))
    except EnvError as error:
        show(error, to="stderr")
        return 1
    show(json.dumps(asdict(report)) if as_json else f"{task.env}\nGroup starts: {report}")
    return 0


def demos_command(parser: Parser, argv: Sequence[str]) -> None:
    """Record successful episodes of a scripted expert, for --algorithm bc. Layout: LeRobot's dataset format.
    Experts: of FetchReach, FetchPush, FetchPickAndPlace, MetaWorld/<task>-v3, and those of --plugin FILE.py.

    Examples:
      groupwise demos FetchPush-v4
      groupwise demos FetchPush-v4 --episodes 20 --noise 0.2 --out demos/push
      groupwise train FetchPush-v4 --algorithm bc --algorithm.data demos/push

    Further options: --env.kwargs JSON, --env.max-episode-steps N, --env.action-repeat N
    """
    parser.usage = "groupwise demos ENV [options]"
    parser.add_argument("--episodes", type=count, default=50, help="how many to keep (default: 50)")
    parser.add_argument("--out", type=Path, help="a new or empty folder (default: demos/<environment>)")
    noise = "standard deviation of noise on executed actions, as a share of half their range (default: 0.1)"
    parser.add_argument("--noise", type=float, default=0.1, help=noise)
    parser.add_argument("--seed", type=int, default=0, help="of starts and noise (default: 0)")
    parser.add_argument("--keep-failures", action="store_true", help="keep episodes without success, too")
    options, rest = parser.parse_known_args(argv)
    if not rest:
        raise ConfigError("expected an environment that has an expert; fix: groupwise demos FetchPush-v4 (see --help)")
    env = parse_env(rest, parser, only=("env.kwargs", "env.max_episode_steps", "env.action_repeat"))

    from groupwise.embodied.demos import record_demos

    found = record_demos(env, **vars(options))
    show(f"Recorded {found.episodes} episodes ({found.steps:,} steps) of {found.attempts} attempts in {found.path}.")
    again = plugins.command("train", *words_of(env), "--algorithm", "bc", "--algorithm.data", found.path)
    show(f"Next:  {again}")


def serve_command(parser: Parser, argv: Sequence[str]) -> None:
    """Start a vLLM server for training on this machine, until Ctrl-C. vLLM is in a virtual environment of its own.

      python -m venv .venv-vllm && .venv-vllm/bin/pip install vllm
      groupwise serve my_model --python .venv-vllm/bin/python
      groupwise serve my_model --python .venv-vllm/bin/python --lora-rank 16 --port 8001 -- --dtype float32
      groupwise train text.json --generation server --generation.urls http://127.0.0.1:8000

    Arguments after -- are vLLM's.
    """
    parser.add_argument("model", help="folder or hub id; with adapters, their base model")
    parser.add_argument("--python", type=Path, required=True, help="Python of the environment that has vLLM")
    parser.add_argument("--port", type=count, default=8000, help="(default: 8000)")
    parser.add_argument("--lora-rank", type=count, help="largest rank of adapters, if adapters are trained")
    parser.add_argument("--log", type=Path, help="file for the server's output (default: a temporary one)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that the start may take (default: 600)")
    end = [*argv, "--"].index("--")
    options = parser.read(argv[:end])

    from groupwise.serving import LocalServer, command

    with tempfile.TemporaryDirectory(prefix="groupwise-") as folder:
        log = options.log or Path(folder) / "server.log"
        words = command(options.python, options.model, argv[end + 1 :], lora_rank=options.lora_rank)
        server = LocalServer(words, log, options.timeout, port=options.port)
        try:
            show(f"starting {' '.join(server.words)}", f"log: {log}")
            server.wait()
            show(f"ready: {server.url}")
            server.join()
        finally:
            server.close()


def list_command(parser: Parser, argv: Sequence[str]) -> None:
    """Print the names of algorithms, presets and choices; of a part, or of what contains a text, also sources and settings.

    Examples:
      groupwise list
      groupwise list presets
      groupwise list gspo
    """
    parts = ("algorithms", "environments", "presets", "choices")
    parser.add_argument("text", nargs="?", default="", help=f"{', '.join(parts)}, or a text such as dapo or kl")
    text = parser.read(argv).text
    sections = {  # lines that are shown together; all but the first are indented
        "Algorithms: --algorithm NAME": [
            [f"{name}: {AlgorithmCfg.named(name).note()}"] for name in sorted(AlgorithmCfg.known)
        ],
        "Environments with tuned settings: groupwise train ID": [
            [f"{env_id}: {', '.join(presets.env_preset(env_id))}"] for env_id in presets.env_ids()
        ],
        "Credit and objective of a paper or library: --preset NAME": [
            [
                f"{name}: {preset.title}",
                preset.note,
                *(f"{key}: {json.dumps(value)}" for key, value in preset.settings.items()),
                preset.source,
            ]
            for name, preset in presets.objective_presets().items()
        ],
        "Each choice of credit and objective": [
            [f"--algorithm.{setting.replace('_', '-')} {value}: {choice.note} [{choice.source}]"]
            for key, choice in presets.choices().items()
            for setting, _, value in [key.rpartition(".")]
        ],
    }

    width = shutil.get_terminal_size().columns
    wrap = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    wanted = text.lower().replace("_", "-")  # options and fields are spelt alike
    for part, entries in zip(parts, sections.values(), strict=True):
        if wanted == part:
            sections = {title: found for title, found in sections.items() if found is entries}
            break
    else:
        for entries in sections.values():
            entries[:] = [entry for entry in entries if wanted in " ".join(entry).lower().replace("_", "-")]
    if not text:
        names = [[first.partition(":")[0].rpartition(" ") for first, *_ in entries] for entries in sections.values()]
        tail = [f"groupwise list {'|'.join(parts)}, or a text such as gspo, shows settings and sources."]
        for title, found in zip(sections, names, strict=True):
            print(f"\n{title}")
            for option in dict.fromkeys(option for option, _, _ in found):
                alike = ", ".join(name for other, _, name in found if other == option)
                print(wrap(f"{option} {alike}".strip(), initial_indent="  ", subsequent_indent="      "))
        print("", *map(wrap, tail), sep="\n")
        return
    if not any(sections.values()):
        known = ", ".join(presets.objective_presets())
        raise ConfigError(f"no entry contains {text!r}; presets: {known}; fix: groupwise list, which shows all names")
    for title, entries in sections.items():
        if entries:
            print(f"\n{title}\n{'-' * min(len(title), width)}")
        for first, *others in entries:
            print(wrap(first, subsequent_indent="    "))
            for line in others:
                print(wrap(line, initial_indent="    ", subsequent_indent="        "))


# plan

_LABEL = 46
_KEPT = {
    "policy": "weights{whole}",
    "learner": "weights{part}, to train",
    "gradients": "gradients{part}",
    "optimizer state": "optimizer state{part}",
    "reference": "reference",
}


def plan_command(parser: Parser, argv: Sequence[str]) -> int:
    """Estimate the memory of each GPU of a run on texts. Nothing is trained, and no weights are loaded. Exit code 1: it
    does not fit.

    Examples:
      groupwise plan text.json --gpus 8 --gpu h100
      groupwise plan text.json --gpus 8 --gpu h200 --engine fsdp --model.precision autocast
      groupwise plan text.json --gpu l40s --model.lora.r 16

    Further options are those of train: groupwise train FILE --help
    """
    parser.usage = "groupwise plan FILE [options]"
    gpus = "processes, each with a GPU of its own; servers have further ones (default: 1)"
    parser.add_argument("--gpus", type=count, default=1, help=gpus)
    parser.add_argument("--gpu", default="h100", help="h100 (the default), a100, h200, b200, l40s or rtx4090")
    prompt = "tokens of a prompt (default: task.max_prompt_tokens, or 256)"
    parser.add_argument("--prompt-tokens", type=count, help=prompt)
    options, rest = parser.parse_known_args(argv)
    if not rest:
        raise ConfigError("expected a file of settings first, as in: groupwise plan text.json --gpus 8 --gpu h100")
    cfg = parse_options(rest, parser)
    if not isinstance(cfg, TextRunCfg):
        raise ConfigError(f"{rest[0]} is a run on an environment; plan is for runs on texts; fix: a file with a task")

    from groupwise.planning import GPUS, fixes, plan_run

    if options.gpu not in GPUS:
        raise UnknownNameError("GPU", options.gpu, GPUS)
    tokens_of_prompt = options.prompt_tokens or cfg.task.max_prompt_tokens or 256
    plan = plan_run(cfg, options.gpus, GPUS[options.gpu], tokens_of_prompt)
    assumed = "" if options.prompt_tokens or cfg.task.max_prompt_tokens else " (assumed; --prompt-tokens)"
    gpu = f"{options.gpus} x {options.gpu} ({plan.gpu / 1e9:g} GB)"
    show(*_plan_lines(plan, gpu, assumed, {} if plan.fits else fixes(plan)))
    return int(not plan.fits)


def _plan_lines(plan: Any, gpu: str, assumed: str, changes: dict[str, float]) -> Iterator[str]:
    total, trained = plan.parameters["all"], plan.parameters["trained"]
    share = "all trained" if trained == total else f"{trained:,} trained"
    yield f"{plan.sizes.name}, {total:,} parameters, {share}, in {plan.cfg.model.precision}"
    yield f"{gpu}{f', engine {plan.cfg.engine}' if plan.ranks > 1 else ''}"
    yield f"A step: {plan.ranks * plan.rows:,} completions of at most {plan.completion:,} tokens"
    yield f"Prompts of {plan.prompt:,} tokens{assumed}\n"

    words = {"part": "", "whole": ""}
    if plan.ranks > 1 and plan.cfg.engine == "fsdp":
        words = {"part": f", 1/{plan.ranks}", "whole": ", whole, to generate"}
    yield f"{'Memory of each GPU':<{_LABEL}}{'GB':>8}"
    yield from (_row(_KEPT[name].format(**words), size) for name, size in plan.kept.items())
    for phase, needed in plan.passing.items():
        yield f"  only in {phase}"
        yield from (_row(f"  {name}", size) for name, size in needed.items())
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    yield _row(f"peak, in {plan.fullest}", plan.peak, f"of {plan.room / 1e9:.1f} usable: {verdict}")
    if plan.host:
        yield f"\n{'Memory of the host, for each GPU':<{_LABEL}}{'GB':>8}"
        yield from (_row(_KEPT[name].format(**words), size) for name, size in plan.host.items())
    yield ""
    if not plan.fits:
        yield f"It does not fit. fix: {'one of' if changes else 'GPUs with more memory, or a smaller model'}"
        yield from (_row(options, peak, "GB at the peak") for options, peak in changes.items())
    yield "An estimate: docs/distributed.md"


def _row(label: str, size: float, remark: str = "") -> str:
    return f"  {label:<{_LABEL - 2}}{size / 1e9:>8.1f}  {remark}".rstrip()
