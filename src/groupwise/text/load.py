"""Loading language models from folders and the hub."""

import logging
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from groupwise import system as files
from groupwise.config.base import flat
from groupwise.config.load import ADAPTER_CONFIG, ADAPTER_SIZES, read_file
from groupwise.config.policy import LoRACfg, ModelCfg, SamplingCfg
from groupwise.data.rollout import all_finite
from groupwise.errors import ConfigError, require_extra
from groupwise.text.policy import CausalLM

_HUB_SECONDS = 10.0
_SECONDS_OF_PATTERNS = 0.5
MAX_INDEX = 64 * files.MIB
"""Bytes of the index of a model's files of weights."""
_LAYERS = ("hidden_layers", "num_layers", "n_layer", "n_layers")
_WIDTHS = ("_size", "_dim", "heads", "experts", "n_embd", "n_head", "n_inner", "n_positions")
"""Settings that count layers, and ends of the names of those that are rows or columns of a matrix."""
_ADAPTERS = (
    "ADALORA", "BEFT", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA", "HRA", "IA3", "LILY",
    "LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "PVERA", "RANDLORA", "ROAD", "SHIRA",
    "SUPERTUNING", "TINYLORA", "UNILORA", "VBLORA", "VERA", "WAVEFT",
)  # fmt: skip
"""Types of peft's that change layers, and are in one folder; XLORA, for one, reads the folders that its settings name."""
_PACKED = 8
"""Most weights in a number, where they are quantised."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def load_causal_lm(
    cfg: ModelCfg, sampling: SamplingCfg | None = None, *, actor_only: bool = True, device: torch.device | str = "cpu"
) -> CausalLM:
    """The policy that ``cfg`` describes, with its tokenizer.

    Adapters in a folder of peft's are loaded onto their base, and trained further.

    Raises:
        ConfigError: no such model, no tokenizer with it, or settings that do not fit it; says which.
        MissingExtraError: a package for adapters or quantised weights is not installed.
    """
    require_extra("transformers", "text")
    from transformers import AutoTokenizer

    base = path = find_model(cfg.path)
    adapters = Path(path) / ADAPTER_CONFIG
    if adapters.is_file():
        name = read_file(adapters).get("base_model_name_or_path")
        try:
            base = find_model(name if isinstance(name, str) else "")
        except ConfigError as error:
            raise ConfigError(f"{adapters} names its base {name!r}: {error}") from None
        if (Path(base) / ADAPTER_CONFIG).is_file():  # transformers would load what they are above, unchecked
            raise ConfigError(f"{adapters} names its base {name!r}, which has adapters itself; fix: merge those first")
    tokenizer, why = None, ""
    for place in dict.fromkeys((base, path)):  # adapters may have one of their own
        try:
            tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        except failures() as error:
            why = f" ({in_short(error)})"
    if tokenizer is None:
        raise ConfigError(f"{path} has no tokenizer that can be read{why}; fix: tokenizer.save_pretrained({path!r})")
    model = _load_base(cfg, base, torch.device(device))
    if adapters.is_file():
        model = _with_saved_adapters(cfg, model, path)
    elif cfg.lora is not None:
        model = with_adapters(model, cfg.lora)
    refuse_nonfinite(model, path if base == path else f"{path} or of its base {base}")
    policy = CausalLM(
        model.to(device),
        sampling,
        actor_only=actor_only,
        tokenizer=tokenizer,
        autocast=torch.bfloat16 if cfg.precision == "autocast" else None,
        gradient_checkpointing=cfg.gradient_checkpointing,
    )
    policy.max_prompt_length(policy.sampling.max_new_tokens)
    return policy


def failures() -> tuple[type[Exception], ...]:
    """Errors of transformers and torch where files of a model are damaged, or its settings make no sense."""
    from huggingface_hub.errors import StrictDataclassError

    damages = (
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        MemoryError,
        OSError,
        RuntimeError,
    )
    return *damages, SafetensorError, StrictDataclassError, TypeError, ValueError


def in_short(error: Exception) -> str:
    """The first line of an error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def find_model(path: str) -> str:
    """The folder of a model, or its id on the hub or in its cache; a ``ConfigError`` if there is none, or a broken ``config.json``."""
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        for child in folder.iterdir():
            if not child.is_file() and not child.is_dir():
                raise ConfigError(f"{child} is neither a file nor a folder; fix: remove it")
        if (folder / "config.json").is_file():
            _check_settings(folder, read_file(folder / "config.json"))
        return str(folder)
    wanted = "fix: a folder with config.json and weights, or a hub id"
    if not path or path[0] in "./~" or path.count("/") > 1:
        raise ConfigError(f"no folder {path!r}; {wanted}")
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    names = {name for name in ("config.json", ADAPTER_CONFIG) if isinstance(try_to_load_from_cache(path, name), str)}
    try:
        if not names:  # asks once; loading would try for half a minute
            names = {file.rfilename for file in HfApi().model_info(path, timeout=_HUB_SECONDS).siblings or ()}
        settings = None if ADAPTER_CONFIG in names else Path(hf_hub_download(path, "config.json"))
    except Exception as error:  # of whichever library asks: offline, unknown, not allowed
        raise ConfigError(f"no folder {path!r}, nor such a model on the hub ({in_short(error)}); {wanted}") from None
    if settings is None:  # transformers would load the base that they name, unchecked
        raise ConfigError(
            f"{path!r} on the hub has adapters; fix: hf download {path} --local-dir FOLDER, and that folder"
        )
    _check_settings(settings.parent, read_file(settings), in_cache=True)
    return path


def _check_settings(folder: Path, tree: dict[str, Any], *, in_cache: bool = False) -> None:
    """Refuse what a model's folder must not ask for, by a ``ConfigError``: kernels of the hub, files elsewhere, or sizes that
    its weights do not have, which transformers would build first. Files of the hub's cache may be still to come.
    """
    settings, where = flat(tree), folder / "config.json"
    for name, value in settings.items():
        if "implementation" in name and isinstance(value, str) and not value.isidentifier():
            raise ConfigError(f"{where}: {name} = {value!r:.100} would run a kernel of the hub; fix: remove it")
    for index in folder.glob("*.index.json"):
        try:
            names = {*files.parse_json(files.read(index, MAX_INDEX, follow=True))["weight_map"].values()}
            absent = [name for name in names if not (folder / name).is_file()]
            wrong = [name for name in names if Path(name).name != name] or absent * (not in_cache)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is damaged ({error!r:.200}); fix: save the model again") from None
        if wrong:
            raise ConfigError(f"{index} names {wrong[0]!r:.100}, which is no file in that folder; fix: save it again")
        if absent:
            return
    tensors, numbers = 0, 0
    for path in folder.glob("*.safetensors"):
        with suppress(OSError, SafetensorError), safe_open(path, "pt") as file:  # a damaged one is an error of loading
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118  it is no dictionary
            tensors, numbers = tensors + len(shapes), numbers + sum(map(math.prod, shapes))
    for name, value in settings.items():
        outer, dot, last = name.rpartition(".")
        width = settings.get(f"{outer}{dot}hidden_size", settings.get(f"{outer}{dot}n_embd", 1))
        is_count = last in _LAYERS or last.endswith("_hidden_layers")
        is_width = last.endswith(_WIDTHS) and "chunk" not in last
        if not tensors or not isinstance(value, int) or not isinstance(width, int) or not (is_count or is_width):
            continue
        if value > tensors if is_count else value * width > _PACKED * numbers:
            raise ConfigError(
                f"{where}: {name} = {value:,}, but there are {tensors:,} tensors with {numbers:,} numbers; fix: the config.json "
                "that belongs to these weights"
            )


def with_adapters(model: Any, cfg: LoRACfg) -> nn.Module:
    """The model with fresh LoRA adapters in float32 by peft; everything else is frozen.

    Raises:
        ConfigError: a target that is no linear layer, the output head, or a layer that peft refuses.
    """
    require_extra("peft", "text")
    with _quiet_peft():
        from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    if cfg.targets != "all-linear":
        head = model.get_output_embeddings()
        kinds = (nn.Linear, Conv1D)
        linear = [name for name, part in model.named_modules() if isinstance(part, kinds) and part is not head]
        for target in cfg.targets:
            if not any(f".{name}".endswith(f".{target}") for name in linear):
                known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
                raise ConfigError(f"lora.targets: no linear layer ends in {target!r}; fix: {known}, or 'all-linear'")
    lora = LoraConfig(
        r=cfg.r,
        lora_alpha=cfg.alpha,
        use_rslora=cfg.rslora,
        use_dora=cfg.dora,
        init_lora_weights=True if cfg.init == "kaiming" else cfg.init,
        lora_dropout=0.0,
        target_modules=cfg.targets if cfg.targets == "all-linear" else list(cfg.targets),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2's transposed layers
        task_type="CAUSAL_LM",
    )
    try:
        with _quiet_peft():
            adapted: nn.Module = get_peft_model(model, lora)
    except ValueError as error:  # some layers of Mamba
        raise ConfigError(
            f"lora.targets = {cfg.targets!r:.100}: {in_short(error)}; fix: names of other layers"
        ) from None
    return adapted


def _with_saved_adapters(cfg: ModelCfg, model: Any, path: str) -> nn.Module:
    require_extra("peft", "text")
    with _quiet_peft():
        from peft import PeftConfig, PeftModel

    if not (Path(path) / "adapter_model.safetensors").is_file():  # peft would take a pickle
        raise ConfigError(f"{path} has no adapter_model.safetensors; fix: save the adapters as safetensors")
    settings = read_file(Path(path) / ADAPTER_CONFIG)
    if (named := settings.get("megatron_config")) is not None:  # peft imports what it names
        raise ConfigError(f"the adapters in {path} have megatron_config = {named!r:.100}; fix: adapters without it")
    if (kind := settings.get("peft_type")) not in _ADAPTERS:
        raise ConfigError(
            f"the adapters in {path} have peft_type = {kind!r:.100}, expected one that changes layers and reads no other folder; "
            "fix: LORA"
        )
    _check_adapters(Path(path), settings, model)
    try:
        saved = PeftConfig.from_pretrained(path)
    except failures() as error:
        raise _damaged(path, error) from None
    if cfg.lora is not None:
        wanted, found = {name: vars(cfg.lora)[name] for name in ADAPTER_SIZES}, {"type": kind}
        if kind == "LORA":
            found = dict(zip(ADAPTER_SIZES, (saved.r, saved.lora_alpha, saved.use_rslora, saved.use_dora), strict=True))
        if found != wanted:
            has, got = (", ".join(f"{name}={value}" for name, value in one.items()) for one in (found, wanted))
            raise ConfigError(f"the adapters in {path} have {has}; got {got}; fix: lora=None, or the same")
        targets, where = cfg.lora.targets, saved.target_modules
        if targets != "all-linear" and {*targets} != ({where} if isinstance(where, str) else {*(where or ())}):
            raise ConfigError(
                f"the adapters in {path} are on {where}; got lora.targets={targets}; fix: lora=None, or the same"
            )
    with _quiet_peft():
        warnings.filterwarnings("error", "Found missing adapter keys")
        try:
            adapted: nn.Module = PeftModel.from_pretrained(model, path, is_trainable=True)
        except UserWarning as error:
            raise ConfigError(f"the adapters in {path} are not complete: {error}; fix: save them again") from None
        except torch.OutOfMemoryError:
            raise
        except failures() as error:
            raise _damaged(path, error) from None
    return adapted


def _check_adapters(folder: Path, settings: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse ranks that the weights do not have, which peft would make first, and patterns that take long, by a ``ConfigError``."""
    where, dims = folder / ADAPTER_CONFIG, [0]
    with suppress(OSError, SafetensorError), safe_open(folder / "adapter_model.safetensors", "pt") as file:
        dims += [size for name in file.keys() for size in file.get_slice(name).get_shape()]  # noqa: SIM118
    of_layers = [
        table if isinstance(table := settings.get(f"{name}_pattern"), dict) else {} for name in ("rank", "alpha")
    ]
    for rank in (settings.get("r"), *of_layers[0].values()):
        if isinstance(rank, int) and rank > max(dims) > 0:  # a damaged file is an error of loading
            raise ConfigError(
                f"{where}: rank {rank:,}, but no tensor has such a size; fix: the one that belongs to these weights"
            )
    given = [settings.get(name) for name in ("target_modules", "exclude_modules")]
    texts = [*(one for one in given if isinstance(one, str)), *chain(*of_layers)]
    patterns = [text for text in texts if not re.fullmatch(r"[\w.]+", text)]  # not names
    try:
        with files.limiting(_SECONDS_OF_PATTERNS):
            for pattern, (name, _) in product(patterns, model.named_modules()):
                re.fullmatch(pattern, name), re.match(rf"(.*\.)?({pattern})$", name)
    except (TimeoutError, re.error, RecursionError) as error:
        raise ConfigError(f"{where}: a pattern of layers: {error}; fix: names of layers") from None


def _damaged(path: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"the adapters in {path} cannot be loaded ({in_short(error):.200}); expected {ADAPTER_CONFIG} and "
        "adapter_model.safetensors that belong to the base; fix: save them again"
    )


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """Hides peft's warning about a name that transformers 6 removes, and one about a kernel for quantised weights.

    The latter is of bitsandbytes, which peft imports also where nothing is quantised.
    """
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")

    def other(record: logging.LogRecord) -> bool:
        return "gemm_4bit_forward" not in record.msg

    log.addFilter(other)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            yield
    finally:
        log.removeFilter(other)


def _load_base(cfg: ModelCfg, path: str, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

    more: dict[str, Any] = {"dtype": torch.bfloat16 if cfg.precision == "bfloat16" else torch.float32}
    if cfg.quantization != "none":
        require_extra("bitsandbytes", "quant")
        compute = torch.float32 if cfg.precision == "float32" else torch.bfloat16
        settings: dict[str, Any] = {"load_in_8bit": True}
        if cfg.quantization != "int8":
            settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": compute}
        more |= {"quantization_config": BitsAndBytesConfig(**settings), "device_map": {"": device}}
    try:
        if AutoConfig.from_pretrained(path, trust_remote_code=False).is_encoder_decoder:
            raise ValueError("it is an encoder-decoder model")  # transformers would load its decoder alone
        more |= {"trust_remote_code": False, "use_safetensors": True, "ignore_mismatched_sizes": True}
        model, found = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **more)
    except torch.OutOfMemoryError:
        raise
    except failures() as error:
        raise ConfigError(
            f"{path} is no language model that transformers can load ({in_short(error)}); fix: a folder with config.json and "
            "weights (safetensors, no code of its own) of a model for causal language modelling"
        ) from None
    refuse_absent(found, path)
    return model


def refuse_absent(found: Mapping[str, Any], path: str) -> None:
    """Refuse a model some of whose weights its files lack, by what transformers tells of its loading."""
    # transformers would draw these at random; tied ones, and those that follow from others, are not among them
    if absent := {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}:
        first = textwrap.shorten(", ".join(sorted(absent)), 200, placeholder=" ...")
        raise ConfigError(
            f"the weights of {path} lack {len(absent)} of the model's, or have them in other shapes: {first}; fix: save the "
            "model again, with the config.json that belongs to it"
        )


def refuse_nonfinite(model: nn.Module, place: str) -> None:
    """Refuse a model with a weight that is NaN or infinite."""
    for name, weight in model.named_parameters():
        if weight.dtype in _FLOATS and not all_finite(weight.detach()):
            raise ConfigError(f"the weights of {place} are not finite: {name}; fix: another copy")
