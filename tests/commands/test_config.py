"""Settings: invalid values, and the order of sources."""

from __future__ import annotations

import argparse
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest

from termgen.commands.settings import SECTIONS, FlagParser, SettingLayers, add_flags, flag_of
from termgen.config import EngineConfig, ServerConfig, UIConfig, setting_types
from termgen.errors import ConfigError


def layers(
    tmp_path: Path,
    *,
    flags: list[str] | None = None,
    environ: dict[str, str] | None = None,
    toml: str | None = None,
) -> SettingLayers:
    """Layers whose config file is `toml` or empty, never the user's own."""
    path = tmp_path / "config.toml"
    path.write_text(toml or "")
    parser = FlagParser(prog="termgen test")
    for title, config_class in SECTIONS.items():
        add_flags(parser, config_class, title=title)
    parsed = vars(parser.parse_args(flags or []))
    return SettingLayers(flags=parsed, environ=environ or {}, config_file=path)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"block_size": 0}, "block_size must be between 1 and 256, not 0"),
        ({"block_size": 24}, "block_size must be a power of two, not 24"),
        ({"block_size": 512}, "block_size must be between 1 and 256, not 512"),
        ({"gpu_memory_utilization": 0}, "greater than 0 and at most 1, not 0"),
        ({"gpu_memory_utilization": 1.01}, "greater than 0 and at most 1, not 1.01"),
        ({"kv_cache_gib": 0.0}, "kv_cache_gib must be greater than 0, not 0"),
        ({"kv_cache_gib": float("nan")}, "kv_cache_gib must be a number, not nan"),
        ({"threads": 0}, "threads must be between 1 and 1024, not 0"),
        ({"dtype": "int4"}, "dtype must be one of auto, float32, bfloat16, float16, not 'int4'"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda"),
        ({"quantization": "fp4"}, "quantization must be one of auto, none, int8, q4, fp8"),
        ({"max_model_len": "4096"}, "max_model_len must be an integer, not '4096'"),
        ({"max_model_len": True}, "max_model_len must be an integer, not True"),
        ({"max_num_seqs": 1.5}, "max_num_seqs must be an integer, not 1.5"),
        ({"enforce_eager": 1}, "enforce_eager must be true or false, not 1"),
        ({"seed": None}, "seed must be an integer, not None"),
        ({"seed": 2**63}, "seed must be between"),
        ({"tokenizer": "x", "skip_tokenizer_init": True}, "exclude each other"),
        (
            {"max_num_batched_tokens": 4, "max_num_seqs": 8},
            r"max_num_batched_tokens \(4\) is less than max_num_seqs \(8\)",
        ),
    ],
)
def test_engine_config_refuses(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        EngineConfig(**setting)
    assert caught.value.param in setting


def test_engine_config_accepts_the_edges() -> None:
    for block_size in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        EngineConfig(block_size=block_size)
    EngineConfig(gpu_memory_utilization=1.0, max_num_batched_tokens=8, max_num_seqs=8)
    EngineConfig(quantization="int8", device="auto")
    config = EngineConfig(kv_cache_gib=2)
    assert config.kv_cache_gib == 2.0 and isinstance(config.kv_cache_gib, float)


def test_configs_are_frozen() -> None:
    for config in (EngineConfig(), ServerConfig(), UIConfig()):
        with pytest.raises(FrozenInstanceError):
            setattr(config, fields(config)[0].name, None)


def test_server_config_lists_and_ranges() -> None:
    assert ServerConfig(api_key=["a", "b"]).api_key == ("a", "b")
    assert ServerConfig(api_key="a").api_key == ("a",)
    for bad in ({"api_key": [""]}, {"api_key": [1]}, {"port": 70000}, {"host": ""}):
        with pytest.raises(ConfigError) as caught:
            ServerConfig(**bad)
        assert caught.value.param in bad


def test_setting_names_are_unique_over_all_sections() -> None:
    """Variables have no section, so one name must mean one setting."""
    names = [f.name for config_class in SECTIONS.values() for f in fields(config_class)]
    assert len(names) == len(set(names))


def test_every_setting_has_help_and_a_flag(tmp_path: Path) -> None:
    parser = FlagParser(prog="termgen test")
    for title, config_class in SECTIONS.items():
        add_flags(parser, config_class, title=title)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for config_class in SECTIONS.values():
        for f in fields(config_class):
            assert f.metadata["help"], f.name
            assert flag_of(f) in flags
            if setting_types(config_class)[f.name].base is bool:
                assert "--no-" + f.name.replace("_", "-") in flags
    assert "%" not in parser.format_usage()


def test_defaults_when_nothing_is_given(tmp_path: Path) -> None:
    found = layers(tmp_path)
    assert found.resolve(EngineConfig) == EngineConfig()
    assert found.resolve(ServerConfig) == ServerConfig()
    assert found.resolve(UIConfig) == UIConfig()


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    toml = "[engine]\nmax-model-len = 1\nmax_num_seqs = 1\nseed = 1\n"
    environ = {"TERMGEN_MAX_MODEL_LEN": "20", "TERMGEN_MAX_NUM_SEQS": "20"}
    found = layers(tmp_path, flags=["--max-model-len", "300"], environ=environ, toml=toml)
    config = found.resolve(EngineConfig, seed=9, block_size=32)
    assert (config.max_model_len, config.max_num_seqs, config.seed) == (300, 20, 1)
    assert config.block_size == 32, "a caller's default is below every source"


def test_boolean_flags_in_both_directions(tmp_path: Path) -> None:
    def config(*flags: str, **environ: str) -> EngineConfig:
        return layers(tmp_path, flags=list(flags), environ=environ).resolve(EngineConfig)

    assert config().async_scheduling is None
    assert config("--no-async-scheduling").async_scheduling is False
    assert config("--async-scheduling").async_scheduling is True
    assert config("--no-enable-prefix-caching").enable_prefix_caching is False
    assert config("--enforce-eager").enforce_eager is True
    assert config(TERMGEN_ENFORCE_EAGER="yes").enforce_eager is True
    assert config("--no-enforce-eager", TERMGEN_ENFORCE_EAGER="1").enforce_eager is False


def test_lists_from_every_source(tmp_path: Path) -> None:
    def keys(**kwargs: Any) -> tuple[str, ...]:
        return layers(tmp_path, **kwargs).resolve(ServerConfig).api_key

    assert keys(flags=["--api-key", "a", "b", "--api-key", "c"]) == ("a", "b", "c")
    assert keys(environ={"TERMGEN_API_KEY": "a, b"}) == ("a", "b")
    assert keys(toml='[server]\napi_key = ["a", "b"]') == ("a", "b")
    assert keys(toml='[server]\napi_key = "a"') == ("a",)


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[engin]\n", "unknown key 'engin'; did you mean engine?"),
        ("[engine]\nblok_size = 4\n", r"unknown key 'blok_size' in \[engine\]; did you mean bl"),
        ("port = 1\n", r"unknown key 'port': it belongs under \[server\]"),
        ("engine = 3\n", "unknown key 'engine'"),
        ("[engine]\nblock_size = 'x'\n", r"block_size must be an integer.*\(from .*config.toml"),
        ("[engine]\nblock_size = 3\n", r"power of two, not 3 \(from .*config.toml, \[engine\]"),
        ("[server]\nport = 1.5\n", "port must be an integer, not 1.5"),
        ("[engine\n", "is not valid TOML"),
    ],
)
def test_a_wrong_file_names_itself_and_the_key(tmp_path: Path, toml: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        found = layers(tmp_path, toml=toml)
        found.resolve(EngineConfig), found.resolve(ServerConfig)
    assert "config.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"TERMGEN_PORT": "eight"}, "TERMGEN_PORT must be an integer, not 'eight'"),
        ({"TERMGEN_PORT": "-1"}, r"port must be between.*\(from TERMGEN_PORT\)"),
        ({"TERMGEN_ENFORCE_EAGER": "maybe"}, "TERMGEN_ENFORCE_EAGER must be true or false"),
        ({"TERMGEN_KV_CACHE_GIB": "inf"}, "kv_cache_gib must be a number"),
        ({"TERMGEN_BLOK_SIZE": "4"}, "TERMGEN_BLOK_SIZE; did you mean TERMGEN_BLOCK_SIZE?"),
    ],
)
def test_a_wrong_variable_is_named(tmp_path: Path, environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        found = layers(tmp_path, environ=environ)
        found.resolve(EngineConfig), found.resolve(ServerConfig)


@pytest.mark.parametrize("service", ["TERMGEN", "TERMGEN_CHAT", "TERMGEN_MAX_QUEUE"])
def test_what_kubernetes_sets_for_a_service_is_no_setting(
    tmp_path: Path, service: str, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {
        f"{service}_SERVICE_HOST": "10.0.0.1",
        f"{service}_SERVICE_PORT": "8000",
        f"{service}_SERVICE_PORT_HTTP_API": "8000",
        f"{service}_PORT": "tcp://10.0.0.1:8000",
        f"{service}_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        f"{service}_PORT_8000_TCP_PROTO": "tcp",
        f"{service}_PORT_8000_TCP_PORT": "8000",
        f"{service}_PORT_8000_TCP_ADDR": "10.0.0.1",
        f"{service}_PORT_53_UDP": "udp://10.0.0.1:53",
        f"{service}_PORT_53_UDP_ADDR": "fd00::1",
    }
    caplog.set_level("DEBUG", "termgen.commands.settings")
    found = layers(tmp_path, environ=environ)
    assert found.resolve(ServerConfig) == ServerConfig()
    assert found.resolve(EngineConfig) == EngineConfig()
    assert {r.levelname for r in caplog.records} == {"DEBUG"}
    assert len(caplog.records) == len(environ)


@pytest.mark.parametrize(
    "variable",
    [
        *("TERMGEN_SERVICE_HOSTS", "TERMGEN_SERVICE", "TERMGEN_PORT_TCP", "TERMGEN_PORT_8000"),
        *("TERMGEN_HOSTS", "TERMGEN_CHAT_PORT", "TERMGEN_PORT_8000_TCP_NAME", "TERMGENX_PORTS"),
    ],
)
def test_what_only_resembles_it_is_refused(tmp_path: Path, variable: str) -> None:
    if not variable.startswith("TERMGEN_"):
        layers(tmp_path, environ={variable: "1"})  # variables of other programs
        return
    with pytest.raises(ConfigError, match=f"unknown environment variable {variable}"):
        layers(tmp_path, environ={variable: "1"})


def test_empty_and_foreign_variables_are_no_settings(tmp_path: Path) -> None:
    environ = {"TERMGEN_PORT": "", "PORT": "x", "TERMGEN_CACHE": "/x"}
    assert layers(tmp_path, environ=environ).resolve(ServerConfig) == ServerConfig()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-model-len", "x"], "--max-model-len: invalid int value: 'x'"),
        (["--max-model-le", "5"], "unknown argument --max-model-le; did you mean --max-model-len"),
        (["--block-size", "3"], r"power of two, not 3 \(from --block-size\)"),
        (["--dtype", "int4"], "--dtype: invalid choice: 'int4'"),
        (["--system"], "--system: expected one argument"),
    ],
)
def test_a_wrong_flag_is_named(tmp_path: Path, flags: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        layers(tmp_path, flags=flags).resolve(EngineConfig)


def test_config_file_by_flag_variable_or_default_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def port(config_file: Path | None, **environ: str) -> int:
        found = SettingLayers(flags={}, environ=environ, config_file=config_file)
        return found.resolve(ServerConfig).port

    paths = {}
    for name, number in (("flag", 1), ("variable", 2), ("home", 3)):
        paths[name] = tmp_path / name / "termgen" / "config.toml"
        paths[name].parent.mkdir(parents=True)
        paths[name].write_text(f"[server]\nport = {number}\n")
    monkeypatch.setattr("platformdirs.user_config_dir", lambda name: str(tmp_path / "home" / name))
    assert port(paths["flag"], TERMGEN_CONFIG=str(paths["variable"])) == 1
    assert port(None, TERMGEN_CONFIG=str(paths["variable"])) == 2
    assert port(None) == 3
    paths["home"].unlink()
    assert port(None) == ServerConfig().port
    with pytest.raises(ConfigError, match="does not exist"):
        port(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        port(tmp_path)


def test_flags_leave_nothing_behind_when_absent() -> None:
    parser = FlagParser(prog="termgen test")
    add_flags(parser, EngineConfig, title="engine", omit=("seed",))
    assert parser.parse_args([]) == argparse.Namespace()
    with pytest.raises(ConfigError, match="unknown argument --seed"):
        parser.parse_args(["--seed", "1"])
