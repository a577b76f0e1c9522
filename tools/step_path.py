"""Which files, functions and lines of the library one training iteration really runs through (collect + update).

    python tools/step_path.py control grpo|ppo        CartPole-v1, default preset, fast paths included
    python tools/step_path.py text                    a tiny random Llama
    python tools/step_path.py                         all three
    ... --functions                                   also every function that is called

Prints a line of JSON for each: files, functions, lines of those functions (source lines, docstrings and blanks left out), the files.
"""

import ast
import inspect
import json
import sys
import tempfile
import textwrap
from collections import defaultdict
from pathlib import Path

import groupwise as gw

ROOT = Path(gw.__file__).parent


def main():
    words = [word for word in sys.argv[1:] if word != "--functions"]
    for path in [words] if words else [["control", "ppo"], ["control", "grpo"], ["text"]]:
        measure(*path)


def measure(what, algo="grpo"):
    seen = {}

    def profiler(frame, event, arg):
        if event != "call":
            return
        code = frame.f_code
        if (
            code.co_filename.startswith(str(ROOT))
            and code not in seen
            and code.co_name not in ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>", "<module>")
        ):
            seen[code] = 1

    class Window(gw.Callback):
        """Profiles the third iteration only: what start-up and first use do, and keeping the first groups, is not the step."""

        def on_iteration_end(self, trainer, rollout, metrics):
            if trainer.iteration == 2:
                sys.setprofile(profiler)
            elif trainer.iteration == 3:
                sys.setprofile(None)
                trainer.stop("measured")

    with tempfile.TemporaryDirectory() as tmp:
        if what == "control":
            gw.train(
                "CartPole-v1",
                algo,
                seed=1,
                run_dir=Path(tmp) / "r",
                callbacks=[Window()],
                total_steps=100_000,
                evaluation={"interval": 90_000, "episodes": 2},
            )
        else:
            sys.path.insert(0, str(Path(__file__).parent))
            from tiny_text import policy, task

            gw.train(
                task(gw),
                gw.GRPOCfg(group_size=4),
                policy=policy(gw),
                num_prompts=2,
                seed=1,
                run_dir=Path(tmp) / "r",
                callbacks=[Window()],
                total_steps=10_000,
                evaluation={"interval": 9_000},
            )
    sys.setprofile(None)
    lines, files, per = 0, set(), defaultdict(int)
    for code in seen:
        n = code_lines(code)
        lines += n
        name = str(Path(code.co_filename).relative_to(ROOT))
        files.add(name)
        per[name] += n
        if "--functions" in sys.argv:
            print(f"{name}: {code.co_qualname}: {n}")
    print(
        json.dumps(
            {
                "files": len(files),
                "functions": len(seen),
                "lines": lines,
                "per_file": dict(sorted(per.items(), key=lambda x: -x[1])),
            }
        )
    )


def code_lines(code):
    try:
        source = textwrap.dedent(inspect.getsource(code))
        node = ast.parse(source).body[0]
    except (OSError, SyntaxError, IndexError):
        return 0
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node):
        skip = node.body[0]
        doc = skip.end_lineno - skip.lineno + 1
    else:
        doc = 0
    body = [line for line in source.splitlines() if line.strip() and not line.strip().startswith("#")]
    return max(0, len(body) - doc)


main()
