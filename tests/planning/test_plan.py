import json

import pytest
from planned import ROUND, WHOLE, planned, settings

from groupwise.planning.plan import fixes


def test_the_report_is_json_and_adds_up(llama):
    report = json.loads(json.dumps(planned(settings(llama), gpus=2).report()))
    assert report["fits"]
    assert report["parameters"] == {"all": 18_080, "trained": 18_080}
    assert report["tokens_per_step"] == 2 * 8 * 6
    assert report["step_seconds"] == pytest.approx(sum(report["seconds"].values()))
    assert report["fixes"] == []


def test_servers_that_write_ahead_hide_the_shorter_part(llama):
    def served(staleness):
        servers = {"name": "server", "urls": ["http://127.0.0.1:1"], "max_staleness": staleness}
        objective = {"importance_sampling_correction": "tis"}
        return planned(settings(llama, generation=servers, algorithm={"objective": objective})).report()

    apart, at_once = served(0), served(2)
    seconds = apart["seconds"]
    assert at_once["seconds"] == seconds
    total = apart["step_seconds"]
    assert total == pytest.approx(sum(seconds.values()))
    longer = max(seconds["generation"] + seconds["publishing"], total - seconds["generation"])
    assert at_once["step_seconds"] == pytest.approx(longer)
    assert at_once["step_seconds"] < total


def roomy(cfg, share, **options):
    """The plan on a GPU with a share of the memory that the run needs."""
    needed = planned(cfg, **options).memory.peak
    return planned(cfg, gpu=ROUND._replace(memory=share * needed), **options)


def test_what_fits_exactly_fits(llama):
    assert roomy(settings(llama), 1.0).fits
    assert not roomy(settings(llama), 0.999).fits


def test_a_part_of_the_memory_is_not_for_tensors(llama):
    cfg = settings(llama)
    needed = planned(cfg).memory.peak
    for share, fits in ((1.12, True), (1.1, False)):
        plan = planned(cfg, gpu=ROUND._replace(memory=share * needed), assumed=WHOLE._replace(usable=0.9))
        assert plan.fits == fits


def test_each_fix_fits_and_is_an_option_of_the_command_line(llama):
    from groupwise.cli.options import parse_options

    cfg = settings(llama, sampling={"max_new_tokens": 900}, num_prompts=640)
    path = llama / "run.json"
    path.write_text(cfg.model_dump_json())
    for gpus in (1, 4):
        plan = roomy(cfg, 0.8, gpus=gpus)
        found = fixes(plan)
        assert found
        for fix in found:
            assert fix.peak <= plan.room
            changed = parse_options([str(path), *" ".join(fix.options).split()], prog="x", description="", flags=())
            assert planned(changed, gpus=gpus).memory.peak == pytest.approx(fix.peak)


@pytest.mark.parametrize(("engine", "options"), [("fsdp", []), ("ddp", ["--engine fsdp"])])
def test_parts_may_go_to_the_host(llama, engine, options):
    model = {"precision": "bfloat16", "gradient_checkpointing": True}
    cfg = settings(llama, {"micro_batch_size": 16}, engine=engine, model=model)
    offloaded = planned(cfg.model_copy(update={"engine": "fsdp", "cpu_offload": True}), gpus=8)
    plan = planned(cfg, gpus=8, gpu=ROUND._replace(memory=offloaded.memory.peak))
    found = fixes(plan)
    assert found[0] == ([*options, "--cpu-offload"], offloaded.memory.peak)
    assert sum("--cpu-offload" in fix.options for fix in found) == 1


def test_several_changes_together_where_none_is_enough(llama):
    cfg = settings(llama, {"micro_batch_size": 200_000}, sampling={"max_new_tokens": 900}, num_prompts=640)
    [fix, *rest] = fixes(roomy(cfg, 0.2))
    assert len(fix.options) > 1
    assert rest == []


def test_nothing_helps_where_the_weights_alone_are_too_large(llama):
    assert fixes(planned(settings(llama), gpu=ROUND._replace(memory=1.0))) == []


def test_a_server_must_hold_the_model(llama):
    cfg = settings(llama, generation={"name": "server"})
    needed = planned(cfg).memory.peak
    small = WHOLE._replace(server_memory=1e-6)
    plan = planned(cfg, gpu=ROUND._replace(memory=2 * needed), assumed=small)
    assert plan.server_rows == 0
    assert not plan.fits
    report = json.loads(json.dumps(plan.report(), allow_nan=False))
    assert report["step_seconds"] is None
