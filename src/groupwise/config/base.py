"""The base of all config classes: frozen, no unknown keys, documented fields, clear errors. Imports no torch."""

import importlib
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_type_hints

from annotated_types import Ge, Gt, Le, Len
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from groupwise.errors import ConfigError, UnknownNameError, nearest

PositiveInt = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]


_IN_PYTHON = "fix: numbers, texts, lists and tables, or a function in Python in place of the name"


def _check_plain(value: Any, at: str = "") -> Any:
    """The value; a ``ValueError`` if a config file would not give it back. Tuples come back as lists."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if not isinstance(key, str):
                raise ValueError(
                    f"{at or 'it'} has the key {key!r:.80}, and keys in a config file are text; {_IN_PYTHON}"
                )
            _check_plain(part, f"{at}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            _check_plain(part, f"{at}[{index}]")
    elif not isinstance(value, str | int | float | None) or value != value:
        raise ValueError(f"{at} = {value!r:.80} cannot be in a config file; {_IN_PYTHON}")
    return value


Kwargs = Annotated[dict[str, Any], AfterValidator(_check_plain)]
"""Arguments of something that is known by its name."""

Keys = Annotated[tuple[str, ...], Len(1)]
"""Entries of a Dict observation."""

GIVEN = "<given in Python>"
"""Placeholder in a config for an object passed in Python."""

OTHER_NAMES = {
    "batch_group_updates": "minibatch_size", "batch_size": "minibatch_size", "beta": "kl_coef", "clip_range": "clip_coef",
    "clip_ratio": "clip_coef", "epsilon": "clip_coef", "epsilon_high": "clip_high", "filter_groups": "dynamic_sampling",
    "group_rollout_buffer_class": "credit", "kl_beta": "kl_coef", "kl_ref_iterations": "sync_ref_model", "lam": "gae_lambda",
    "loss_type": "aggregation", "lr": "learning_rate", "n_epochs": "num_epochs", "n_steps": "num_steps",
    "num_generations": "group_size", "num_iterations": "num_epochs", "ref_model_mixup_alpha": "sync_ref_model",
    "ref_model_sync_steps": "sync_ref_model", "scale_rewards": "scale", "update_epochs": "num_epochs",
    "n_action_steps": "num_action_steps", "n_envs": "num_envs",
    "n_iterations": "total_iterations", "num_train_epochs": "total_epochs", "total_timesteps": "total_steps",
    "callback": "callbacks of gw.train", "eval_freq": "interval", "n_eval_episodes": "episodes",
    "activation_fn": "activation", "net_arch": "hidden_sizes", "max_completion_length": "max_new_tokens", "rank": "r",
    "train_dataset": "data", "reward_fn": "rewards", "reward_funcs": "rewards", "reward_function": "rewards",
    "algo": "algorithm", "bf16": "precision", "eval_steps": "interval", "gradient_accumulation_steps": "num_prompts",
    "max_output_tokens": "max_new_tokens", "max_tool_calling_iterations": "max_turns", "max_prompt_length": "max_prompt_tokens", "max_steps": "total_iterations",
    "enjoy": "play", "load_best": "checkpoint", "n_timesteps": "total_steps", "output_dir": "run_dir", "peft_config": "model.lora",
    "per_device_train_batch_size": "num_prompts", "policy_kwargs": "policy", "save_freq": "checkpoint_interval",
    "save_steps": "checkpoint_interval", "tensorboard_log": "report_to", "use_vllm": "generation", "verbose": "progress",
    "warmup_ratio": "warmup of schedule", "warmup_steps": "warmup of schedule",
    "stochastic": "sampled", "env_kwargs": "env.kwargs", "render_mode": "groupwise play, or eval with --video",
    **dict.fromkeys(("frame_skip", "num_repeats"), "env.action_repeat, or env.kwargs if the environment takes it"),
    "n_trials": "a search with Optuna, see docs/coming_from.md",
    "optimize": "a search with Optuna, see docs/coming_from.md",
    "optimize_hyperparameters": "a search with Optuna, see docs/coming_from.md",
    "sde_sample_freq": "nothing, actions are drawn from the policy's distribution", "truncate_at_first_done": "nothing, it is always so",
    "init_lora_weights": "init", "lora_alpha": "alpha", "target_modules": "targets", "use_dora": "dora", "use_rslora": "rslora",
    "use_sde": "nothing, actions are drawn from the policy's distribution",
    **dict.fromkeys(("CnnPolicy", "MlpPolicy", "MultiInputPolicy"), "actor_critic, the default: leave it out"),
    **dict.fromkeys(("ddpg", "dqn", "sac", "td3", "tqc"), "ppo or grpo, as there is no off-policy algorithm"),
    "MlpLstmPolicy": "recurrent", "a2c": "ppo", "trpo": "ppo",
    "learn": "gw.resume(run.path, total_steps=...)", "predict": "run.policy.predict", "save": "nothing, run.path has it all",
}  # fmt: skip
"""Settings and choices by their names in other libraries, as in docs/coming_from.md."""

DEVICE = r"^(cpu|auto|cuda(:\d+)?)$"
URL = r"^https?://(\[[^\]\s]+\]|[^/:\s]+)(:\d{1,5})?$"
FORMS = {
    DEVICE: "'cpu', 'cuda', 'cuda:1', or 'auto' for a GPU if there is one",
    URL: "http://HOST:PORT or https://HOST:PORT",
}
"""Patterns of settings, in words."""


class Cfg(BaseModel):
    """A frozen group of settings. The docstring of a field gives its meaning, unit, range and the source of its default.

    Raises:
        ConfigError: a field is unknown, or its value is wrong.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # in arguments of environments
    )
    programs: ClassVar[tuple[str, ...]] = ()
    """Fields that name a program, or its arguments. A file may be a stranger's, so ``check_programs`` refuses them there."""

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError("\n".join(f"{type(self).__name__}: {line}" for line in explain(error.errors()))) from None

    # Marked as pydantic marks its own __init__: then pydantic calls it only for the outermost config, and errors inside
    # keep their full path. There is no public way: an error raised by a validator becomes a ValidationError.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def changed(self, *names: str) -> dict[str, Any]:
        """The named fields that differ from their defaults, with their values."""
        return {name: vars(self)[name] for name in names if vars(self)[name] != type(self).model_fields[name].default}

    def named_programs(self, prefix: str = "") -> dict[str, Any]:
        """The programs that these settings name, and their arguments, by path."""
        found = {f"{prefix}{name}": value for name, value in self.changed(*self.programs).items()}
        for name, value in self:
            for part in value if isinstance(value, tuple) else (value,):
                found |= part.named_programs(f"{prefix}{name}.") if isinstance(part, Cfg) else {}
        return found

    @model_validator(mode="wrap")
    @classmethod
    def _refuse_unknown_keys_and_other_types(cls, data: object, handler: Callable[[object], Any]) -> Any:
        given = data if isinstance(data, Mapping) else {}
        if unknown := [cls._unknown(str(key)) for key in given if key not in cls.model_fields]:
            raise ValueError(" ".join(unknown))
        made = handler(data)
        for key, value in given.items():
            if _of_another_type(value, taken := vars(made)[key]):
                raise ValueError(f"{key} = {value!r:.200} has the wrong type; fix: {json.dumps(taken)}")
        return made

    @classmethod
    def _unknown(cls, key: str) -> str:
        """The message on an unknown key: the field that was meant here or one level below, or all fields."""
        known, name = sorted(cls.model_fields), OTHER_NAMES.get(key, key)
        groups = {part: getattr(type(field.default), "model_fields", ()) for part, field in cls.model_fields.items()}
        found = [repr(name)] if name in known else [f"{part}.{name}" for part, own in groups.items() if name in own]
        # epsilon is Adam's eps
        found = found or [repr(field) for field in known if len(field) > 2 and key.startswith(field)]
        if found or " " in name or "." in name:
            return f"unknown key {key!r}; {meant(found or [name])}"
        if name != key:
            return f"unknown key {key!r}; here: {name}, elsewhere"
        below = {field: f"{part}.{field}" for part, own in groups.items() for field in own if field not in known}
        near = nearest(key, [*known, *below], cutoff=0.6) or f"; known: {', '.join(known)}"
        for field, path in below.items():
            near = near.replace(f"mean {field!r}", f"mean {path}")
        return f"unknown key {key!r}{near}"


def meant(names: Sequence[str]) -> str:
    """A hint on the settings that another library's name stands for."""
    return f"here: {names[0]}." if " " in names[0] else f"did you mean {' or '.join(names)}?"


def refuse_unknown(settings: Iterable[str], known: Collection[str], owner: str) -> None:
    """Refuse arguments that ``owner`` does not have, by a ``ConfigError`` with the nearest one."""
    for name in settings:
        if name not in known:
            if (other := OTHER_NAMES.get(name)) is not None:
                near = nearest(other, known, cutoff=0.8) or f"; {meant([other])}"
            else:
                near = nearest(name, known) or f"; known: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown setting {name!r} of a {owner}{near}")


def check_programs(cfg: Cfg, where: object, *, given: Iterable[str] = ()) -> None:
    """Refuse programs that the settings of a file name, by a ``ConfigError``; those at the paths ``given`` are the user's."""
    own = [f"{path}." for path in given]
    named = {path: value for path, value in cfg.named_programs().items() if not f"{path}.".startswith((*own,))}
    if named:
        shown = ", ".join(f"{path} = {json.dumps(value, default=str)}" for path, value in named.items())
        raise ConfigError(
            f"{where} names a program to run ({shown:.1000}{' ...' * (len(shown) > 1000)}), and may be a stranger's; fix: if you "
            "trust it, add --allow-programs (in Python allow_programs=True)"
        )


def _of_another_type(given: object, taken: object) -> bool:
    """Whether pydantic made a number of a text or a truth value, or a truth value of another value."""
    if isinstance(given, list | tuple) and isinstance(taken, tuple):
        return any(map(_of_another_type, given, taken))
    if isinstance(taken, bool) or isinstance(given, bool):
        return isinstance(taken, bool | int | float) and type(taken) is not type(given)
    return isinstance(taken, int | float) and not isinstance(given, int | float)


_OF_UNIONS = re.compile(r"literal\[|constrained-|function-")
"""Parts that pydantic adds to the path of a setting that may have several types."""


def explain(errors: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each setting that pydantic refuses: path, value, expectation, the nearest name."""
    lines: dict[str, str] = {}
    for item in errors:
        path = ".".join(str(part) for part in item["loc"] if not _OF_UNIONS.match(str(part)))
        if item["type"] == "missing":
            lines[f"{path} is missing; fix: give it"] = ""
        elif item["type"] == "value_error" and not inspect.isroutine(item["input"]):
            lines[f"{path}: {item['ctx']['error']}" if path else str(item["ctx"]["error"])] = ""
        else:
            head, expected = f"{path} = {item['input']!r:.200}: ", _expected(item)
            other = expected.removeprefix("input should be ")  # the setting may have several types
            if head not in lines:
                lines[head] = expected
            elif other not in lines[head]:
                lines[head] += f", or {other}"
    return [head + expected for head, expected in lines.items()]


def _expected(item: Mapping[str, Any]) -> str:
    match item["type"]:
        case _ if inspect.isroutine(item["input"]):
            return (
                "expected data, got a function; fix: a value (schedule='linear' lowers the learning rate, "
                "clip_coef={'name': 'linear', 'start': 0.2, 'end': 0.0} the clip range)"
            )
        case "string_pattern_mismatch" if item["ctx"]["pattern"] in FORMS:
            return f"expected {FORMS[item['ctx']['pattern']]}"
        case "literal_error":
            choices = re.findall(r"[^\s',]+(?=')|\b\d+\b", item["ctx"]["expected"])
            return f"expected one of {', '.join(choices)}{nearest(str(item['input']), choices)}"
        case "model_type":
            return "expected settings by name"
        case "tuple_type":
            return f"expected a list; fix: [{json.dumps(item['input'], default=repr)}]"
        case _:
            return f"{item['msg'][0].lower()}{item['msg'][1:]}"


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their full names."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


# Choices: settings with a name and parameters, such as {"name": "cispo", "high": 5.0} or "cispo"


class Choice(Cfg):
    """A member of a family of choices, described by the first line of its docstring.

    ``class Mine(Family, name="mine")`` registers it, and raises a ``ConfigError`` if another class has the name.
    """

    name: str = ""
    """Name in the registry."""
    source: ClassVar[str] = "groupwise"
    """URL of the paper or library; ``groupwise`` if it was developed here."""
    family: ClassVar[str] = ""
    """Name of the family in messages."""
    default: ClassVar[str] = ""
    """The member that parameters without a name belong to."""
    known: ClassVar[dict[str, type[Any] | str]] = {}
    """Members by name: classes, or modules that register them on import."""

    def __init_subclass__(
        cls, family: str = "", default: str = "", name: str = "", source: str = "", **config: Any
    ) -> None:
        """Make it a family, with the name of its default member, or a member, with a name."""
        super().__init_subclass__(**config)
        cls.source = source or cls.source
        if family:
            cls.family, cls.default, cls.known = family, default, dict(vars(cls).get("known", {}))
        if name:  # pydantic makes fields of annotations after this
            described = Field(description="Name in the registry.")
            cls.__annotations__ = {"name": Annotated[Literal[name], described]} | inspect.get_annotations(cls)
            cls.name = name

    @classmethod
    def __pydantic_init_subclass__(cls, name: str = "", **_: Any) -> None:
        """Register it, once it is complete."""
        if name:
            register_choice(cls)

    def __init__(self, /, **fields: Any) -> None:
        super().__init__(**{"name": type(self).own_name() or ""} | fields)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # as in Cfg

    def parameters(self) -> dict[str, Any]:
        """Settings other than the name."""
        return {name: value for name, value in vars(self).items() if name != "name"}

    @classmethod
    def own_name(cls) -> str | None:
        """The default of the field ``name``, if it has one."""
        default: str = cls.model_fields["name"].default
        return default or None

    @classmethod
    def named(cls, name: str) -> type[Any]:
        """The member of this family with that name, or an ``UnknownNameError``."""
        found = cls.known.get(name)
        if isinstance(found, str):
            importlib.import_module(found)
            found = cls.known[name]
        if not isinstance(found, type):
            ours = OTHER_NAMES.get(name, "")
            hint = meant([ours]) if " " in ours else f"did you mean {ours!r}?" if ours in cls.known else None
            raise UnknownNameError(cls.family, name, cls.known, hint=hint)
        return found

    @classmethod
    def members(cls) -> list[type[Any]]:
        """All members of this family, sorted by name."""
        return [cls.named(name) for name in sorted(cls.known)]

    @classmethod
    def note(cls) -> str:
        """One-line description."""
        return (cls.__doc__ or "").partition("\n")[0].rstrip(".")

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, value: object, handler: Callable[[object], Self]) -> Any:
        if "known" not in vars(cls) or isinstance(value, Choice):
            return handler(value)
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping):
            return handler(value)
        return cls.named(str(value.get("name", cls.default))).model_validate(value)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        if "known" not in vars(cls):
            return handler(schema)
        return {
            "anyOf": [{"enum": sorted(cls.known)}, *(handler(kind.__pydantic_core_schema__) for kind in cls.members())]
        }


C = TypeVar("C", bound=type[Choice])


def register_choice(choice: C) -> C:
    """Register a choice under the default of its ``name``.

    Raises:
        ConfigError: ``name`` has no default, or belongs to another class.
    """
    name = choice.own_name()
    if not name:
        raise ConfigError(f"{choice.__name__} has no name; fix: class {choice.__name__}(..., name='my_name')")
    taken = choice.known.get(name)
    again = repr(taken) == repr(choice)  # defined again, as when a notebook's cell runs twice
    if taken not in (None, choice.__module__) and not again:
        raise ConfigError(f"{choice.family} {name!r} is registered already; fix: another name")
    choice.known[name] = choice
    return choice


def settings_of(
    function: Callable[..., Any],
    name: str,
    family: type[Choice],
    check: Callable[..., None] | None = None,
    **attributes: Any,
) -> None:
    """Register settings that a function's signature describes: types, bounds and defaults of all but its first parameter.

    A setting's text stands under ``Args:`` of the docstring. A parameter that the family's default member has too, such as
    ``clip_low``, takes type and text from there. ``Source:`` gives the URL. The class is the function's ``Settings``.

    Args:
        check: called with the settings; raises a ``ValueError`` where they contradict each other.
        attributes: class attributes of the settings.

    Raises:
        ConfigError: the name is taken, or a parameter has no type.
    """
    doc, hints = inspect.getdoc(function) or "", get_type_hints(function, include_extras=True)
    arguments = re.search(r"^Args:\n((?:(?: {4}.*)?\n?)*)", doc, re.MULTILINE)
    texts = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", arguments[1] if arguments else "", re.MULTILINE))
    shared = family.named(family.default).model_fields
    fields: Any = {}
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        key, default = parameter.name, parameter.default
        default = ... if default is parameter.empty else default
        if key in shared:
            fields[key] = shared[key].rebuild_annotation(), Field(default, description=shared[key].description)
        elif key in hints:
            fields[key] = hints[key], Field(default, description=" ".join(texts.get(key, "").split()) or None)
        else:
            raise ConfigError(f"setting {key!r} of {family.family} {name!r} has no type; fix: {key}: float")

    def checked(self: Choice) -> Choice:
        if check is not None:
            check(**self.parameters())
        return self

    source = re.search(r"^Source: .*?(https://[^\s,;]+)", doc, re.MULTILINE)
    site = source[1].rstrip(".") if source else ""
    settings: Any = create_model(
        f"{name.title().replace('_', '')}Cfg",
        __base__=family,
        __doc__=doc,
        __module__=function.__module__,
        __qualname__=f"{function.__qualname__}.Settings",
        # docstrings of attributes are above; looking for them takes 0.1 s a class
        __cls_kwargs__={"use_attribute_docstrings": False, "name": name, "source": site},
        **fields | {"__validators__": {"checked": model_validator(mode="after")(checked)}},
    )
    settings.__name__ = settings.__qualname__  # torch.compile takes no objects of classes that look local
    for attribute, value in attributes.items():
        setattr(settings, attribute, value)
    vars(function)["Settings"] = settings
