"""docs/http-api.md: its examples run, and its lists are those of the code."""

import asyncio
import re
from pathlib import Path

from server_helpers import ScriptedEngine, served, token_ids

from kvflow.server.metrics import ServerMetrics
from kvflow.server.unsupported import CHAT, COMPLETIONS

PAGE = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
CLIENT, EMBEDDING = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_client_example(tokenizer, capsys):
    engine = ScriptedEngine(tokenizer.vocab_size, script=(*token_ids(tokenizer, "return x"), 0))

    async def scenario(url):
        names = {"url": url, "model": engine.model_name}
        await asyncio.to_thread(exec, CLIENT, names)

    served(engine, tokenizer, scenario)
    shown = capsys.readouterr().out
    assert shown.startswith("return x\n {'nbytes': 640")
    assert shown.endswith("prompt tokens reused\n")


def test_the_embedding_example(tokenizer, tokenizer_dir, capsys):
    names = {}
    exec(EMBEDDING, names)
    asyncio.run(names["main"](ScriptedEngine(tokenizer.vocab_size), tokenizer_dir))
    assert capsys.readouterr().out.startswith("listening on http://127.0.0.1:")


def test_every_refused_field_and_every_metric_is_listed():
    refused = PAGE[PAGE.index("**Refused by name**") : PAGE.index("**Ignored**")]
    names = {"guided_*" if n.startswith("guided_") else n for n in {*CHAT, *COMPLETIONS}}
    listed = set(re.findall(r"`([a-z_]+\*?)`", refused)) - {"unsupported_parameter"}
    assert listed == names - {"echo"}
    assert all(f"`{metric.name}" in PAGE for metric in ServerMetrics().snapshot())
