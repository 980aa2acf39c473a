"""A deterministic engine, a small byte-level tokenizer, and a real server around them."""

import asyncio
import json
from pathlib import Path

import httpx
import numpy as np
import openai
import tokenizers
from attrs import define, field
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from kvflow.engine.api import InvalidRequest, Metric, Overloaded, Sample, TokenOutput
from kvflow.errors import TransferError
from kvflow.server import make_app, serve

TEMPLATE = """\
{%- for message in messages -%}
<|{{ message.role }}|>
{{ message.content | trim }}<|end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|assistant|>
{% endif -%}
"""
TEXTS = [
    "def main(argv):\n    return [x * 2 for x in argv]\n",
    "Größe, naïve café — 東京 привет 🙂👩‍👩‍👧 e\u0301",
    "the quick brown fox jumps over the lazy dog " * 3,
]


def write_tokenizer(directory: Path) -> Path:
    """Train a byte-level BPE on a few lines and save it the way model directories hold it."""
    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    encoder.train_from_iterator(TEXTS, trainer)
    encoder.add_tokens([AddedToken("<think> é", special=False)])
    encoder.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "bos_token": None, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@define(eq=False)
class ScriptedEngine:
    """A tiny language model: logits are a function of position, choices of (seed, position).

    With `script` its tokens come in turn, whatever the seed, and the last one repeats.
    """

    vocab_size: int
    eos: int = 0
    script: tuple[int, ...] = ()
    delay_s: float = 0.0
    capacity: int | None = None
    refuse_after: int = 0  # a full engine refuses when it has given this many tokens
    fail_at: int | None = None
    refuse: bool = False
    well: bool = True
    unfinished: bool = False
    max_model_len: int = 512
    model_name: str = "tiny/scripted"
    live: set[str] = field(factory=set)
    aborted: list[str] = field(factory=list)
    seen: list = field(factory=list)
    num_outputs: int = 0
    kept: list = field(factory=list)

    def _choose(self, sampling, idx, position):
        logits = np.random.default_rng(position).standard_normal(self.vocab_size) * 3
        logits[self.eos] = -30
        if self.script:
            logits[self.script[min(idx, len(self.script) - 1)]] = 60
        logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        noise = np.random.default_rng([sampling.seed, position]).gumbel(size=self.vocab_size)
        chosen = int(np.argmax(logprobs + min(sampling.temperature, 1.0) * noise))
        best = np.argsort(-logprobs)[: sampling.num_logprobs or 0]
        return chosen, float(logprobs[chosen]), tuple((int(t), float(logprobs[t])) for t in best)

    def generate(self, request):
        outputs = self._generate(request)
        self.kept.append(outputs)  # so that garbage collection never closes one for the server
        return outputs

    async def _generate(self, request):
        if self.refuse:
            raise InvalidRequest("prompt", "prompt has token id 7, which this engine refuses")
        if self.capacity is not None and len(self.live) >= self.capacity:
            while self.num_outputs < self.refuse_after:
                await asyncio.sleep(0.001)
            raise Overloaded(f"{len(self.live)} requests live, at most {self.capacity} taken")
        self.seen.append(request)
        self.live.add(request.request_id)
        done = False
        try:
            for idx in range(request.sampling.max_tokens):
                await asyncio.sleep(self.delay_s)
                if idx == self.fail_at:
                    raise TransferError("secret detail of rank 3")
                output = self._output(request, idx)
                done = output.finish_reason is not None
                if done and self.unfinished:
                    return
                self.num_outputs += 1
                yield output
                if done:
                    return
        finally:
            self.live.discard(request.request_id)
            if not done:
                self.aborted.append(request.request_id)

    def _output(self, request, idx):
        sampling, position = request.sampling, len(request.prompt) + idx
        token, logprob, best = self._choose(sampling, idx, position)
        ended = token in sampling.stop_token_ids or (token == self.eos and not sampling.ignore_eos)
        reason = "stop" if ended else "length" if idx + 1 == sampling.max_tokens else None
        wanted = sampling.num_logprobs is not None
        return TokenOutput(
            request.request_id,
            token,
            position,
            reason,
            logprob=logprob if wanted else None,
            top_logprobs=best,
            cached_tokens=len(request.prompt) // 2 if idx == 0 else 0,
            transfer={"nbytes": 640, "plan_digest": "ab12", "verified": True} if idx == 0 else None,
        )

    def metrics(self):
        samples = [Sample(3, {"pool": 'a"b\\n\nd'})]
        return [Metric("kvflow_free_blocks", "Free blocks.", "gauge", samples)]

    async def healthy(self):
        return self.well


def token_ids(tokenizer, text: str) -> tuple[int, ...]:
    return tokenizer.encode(text, add_special_tokens=False)


def served(engine, tokenizer, scenario, config=None):
    """Run `scenario(url)` against a real server; then nothing may still run in the engine."""

    async def main():
        async with serve(make_app(engine, tokenizer, config), port=0) as running:
            result = await scenario(running.url)
        assert engine.live == set()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        assert not others, others
        return result

    return asyncio.run(main())


def with_openai(engine, tokenizer, scenario, config=None):
    """The same with an `openai.AsyncOpenAI` client that does not retry."""

    async def main(url):
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0
        ) as client:
            return await scenario(client)

    return served(engine, tokenizer, main, config)


def with_httpx(engine, tokenizer, scenario, config=None):
    """The same with an `httpx.AsyncClient`."""

    async def main(url):
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            return await scenario(client)

    return served(engine, tokenizer, main, config)


async def wait_until(condition, within_s: float = 3.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)
