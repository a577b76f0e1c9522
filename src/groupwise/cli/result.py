"""What a command prints once a run has ended."""

from typing import Any

from groupwise import plugins
from groupwise.config.run import BUDGETS
from groupwise.system import show


def print_run(run: Any, quiet: bool = False) -> int:
    """Print the result of a run and the next command; returns the exit code.

    Args:
        quiet: name the run folder in place of commands.
    """
    found = run.summary
    if "seconds" not in found:  # of several processes, the first one reports
        return 0
    reached = ""
    if (score := found.get("return_mean")) is not None:
        kind = "greedy return" if run.cfg.evaluation.deterministic else "return"
        interval = "95 % interval {:.4g} to {:.4g}".format(*found["ci95"]) if found.get("ci95") else "no interval"
        cut = f", {count} cut at the step limit" if (count := found.get("cut_episodes")) else ""
        reached = f": {kind} {score:.1f} ({found['episodes']} episodes{cut}, {interval})"
        best = f"{found['best_return_mean']:.1f}"
        if (rate := found.get("success_rate")) is not None:
            low, high = (100 * end for end in found["success_ci95"])
            reached += f", success {100 * rate:.0f} % (95 % interval {low:.0f} to {high:.0f})"
            best += f", success {100 * found['best_success_rate']:.0f} %,"
        reached += f". Best {best} at step {found['best_env_steps']:,}"
    where = f" Run folder: {run.path}" if quiet else ""
    show(f"Done in {found['seconds']:.1f} s{reached}.{where}")
    if found["stopped"] not in BUDGETS:
        show(f"Stopped at step {found['env_steps']:,}: {found['stopped']}.")
    if 0 < found.get("updates_without_gradient", 0) == found["iterations"]:
        show("Nothing was learned: the gradient of every update was 0 (docs/troubleshooting.md).")
    steps, iterations = found.get("unsaved_env_steps"), found.get("unlogged_iterations")
    if steps or iterations:
        what = f"the last {steps:,} steps" if steps else f"metrics of {iterations:,} iterations"
        again = f", then {plugins.command('resume', run.path)}" if steps else ""
        show(f"NOT SAVED: {what}; fix: make room{again}", to="stderr")
        return 1
    if not quiet:
        show(f"Look:  {plugins.command('report', run.path)}", f"Next:  {plugins.command('eval', run.path)}")
    return 0
