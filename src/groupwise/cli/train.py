"""``groupwise train``: train a policy, once or with several seeds."""

from collections.abc import Sequence

from groupwise.cli.launch import LAUNCH_FLAGS, parse_launch, torchrun
from groupwise.cli.parser import Parser, count
from groupwise.cli.result import print_run
from groupwise.errors import ConfigError
from groupwise.report.folder import RunFolder
from groupwise.system import show_errors_only, show_everything

HELP = """Train a policy on a Gymnasium environment, or with the settings of a JSON or YAML file.

  groupwise train CartPole-v1
  groupwise train CartPole-v1 --algorithm ppo --seed 3
  groupwise train CartPole-v1 --preset dr_grpo --seeds 0-9
  groupwise train my_run.json --algorithm.learning-rate 3e-4
  groupwise train --config my_run.yaml

Options, with the defaults of this environment:
  --seeds 0-9                         or 0,3,5: one run per seed, in parallel
  --launcher local                    or torchrun, ray: several processes (--workers 2; for Ray --cpus 1 --gpus 0,
                                      with generation.python also --servers 1 --server-cpus 1 --server-gpus 0)
  --plugin FILE.py                    import your file first
  --preset NAME                       credit and objective of a paper; see: groupwise list
  -q, --quiet                         print errors and the result only
  -v, --verbose                       print every iteration, and what the library logs
  --profile [3]                       record that many iterations with torch.profiler, into profile/ of the run folder
"""


def run(parser: Parser, argv: Sequence[str]) -> int:
    """Train the run, or the seeds, that ``argv`` describes."""
    launch, words = parse_launch(argv)
    if launch.launcher != "local" and any(word.partition("=")[0] == "--seeds" for word in words):
        raise ConfigError("--seeds has processes of its own; fix: leave --launcher out")
    parser.add_argument("--seeds")
    parser.add_argument("--profile", type=count, nargs="?", const=3)
    output = parser.add_mutually_exclusive_group()
    output.add_argument("-q", "--quiet", dest="progress", action="store_const", const="none")
    output.add_argument("-v", "--verbose", dest="progress", action="store_const", const="iterations")
    options, rest = parser.parse_known_args(words)

    from groupwise.cli.options import parse_options

    flags = ("seeds", "profile", "preset", "quiet", "verbose", *LAUNCH_FLAGS)
    cfg = parse_options(rest, prog="groupwise train", description=HELP, flags=flags)
    if options.progress is not None:
        show_errors_only() if options.progress == "none" else show_everything()
        cfg = cfg.model_copy(update={"logging": cfg.logging.model_copy(update={"progress": options.progress})})
    if options.seeds is not None:
        if options.profile is not None:
            raise ConfigError("--profile is of a single run, got --seeds too; fix: one of them")
        from groupwise.cli.seeds import parse_seeds, train_seeds

        return train_seeds(cfg, parse_seeds(options.seeds))

    quiet = options.progress == "none"
    if launch.launcher != "local":
        if cfg.run_dir is None:
            raise ConfigError("several processes need one run folder; fix: --run-dir")
        RunFolder.check_free(cfg.run_dir)
    if launch.launcher == "torchrun":
        torchrun(["train", *words], launch.num_workers)
    if launch.launcher == "ray":
        if options.profile is not None:
            raise ConfigError("--profile is not for --launcher ray; fix: --launcher torchrun")
        from groupwise.integrations.ray import train_from_config_on_ray

        return print_run(train_from_config_on_ray(cfg, **launch.on_ray()), quiet)

    from groupwise.run import train_from_config

    if options.profile is None:
        return print_run(train_from_config(cfg), quiet)

    from groupwise.training.trackers import Profiler

    return print_run(train_from_config(cfg, callbacks=[Profiler(options.profile)]), quiet)
