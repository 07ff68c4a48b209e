"""Samples of the server that stands in for SGLang, the model that they are drawn from, and answers about them."""

import base64
import json
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file

from megarl.rollout.protocol import SamplingParameters
from megarl.rollout.transformers.sampling import kept_log_probs

_TOLD_OF_TOKENS = {"output_token_logprobs", "output_token_sampling_logprobs", "output_token_sampling_mask"}


class Model:
    """All tensors of a folder, by their names in it."""

    def __init__(self, folder):
        self._tensors = load_file(folder / "model.safetensors")
        self.config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))

    def named_parameters(self):
        return self._tensors.items()

    def parameters(self):
        return self._tensors.values()

    def buffers(self):
        return []

    def modules(self):
        return []

    def named_modules(self):
        return []

    def load_weights(self, tensors):
        for name, tensor in tensors:
            # As SGLang's models: what is not known is skipped, without an error.
            if name in self._tensors:
                self._tensors[name].copy_(tensor)

    def hidden(self, token):
        return self._tensors["model.embed_tokens.weight"][token]

    def logits(self, hidden):
        return hidden @ self._tensors["lm_head.weight"].T


class Sample:
    """A sample, and what a stream of it tells."""

    def __init__(self, prompt, sampling, limit, asked, sizes=()):
        self.prompt, self.sampling, self.asked, self.sizes = prompt, sampling, asked, sizes
        self.most = max(0, min(sampling["max_new_tokens"], limit - len(prompt) - 1))
        self.token_ids, self.log_probs, self.kept_log_probs, self.versions = [], [], [], []
        self.reason = None
        self.is_aborted = False
        self.told = 0
        self.is_told = False
        """Whether its end was told of."""

    def step(self, model, adapters, version, ends):
        hidden = model.hidden((self.prompt + self.token_ids)[-1])
        if (adapter := self.asked.get("lora_path")) is not None:
            hidden = adapters.adapted(adapter, hidden)
        logits = model.logits(hidden).double()
        greedy = self.sampling["temperature"] == 0
        log_probs = (logits if greedy else logits / self.sampling["temperature"]).log_softmax(-1)
        kept = log_probs
        if self.asked["return_sampling_mask"]:
            kept = kept_log_probs(log_probs[None], SamplingParameters(**self._cut()))[0]
        noise = np.random.default_rng((self.sampling["sampling_seed"], len(self.prompt) + len(self.token_ids)))
        gumbel = 0 if greedy else torch.from_numpy(noise.gumbel(size=len(kept)))
        token = int((kept + gumbel).argmax())
        self.token_ids.append(token)
        self.log_probs.append(float(log_probs[token]))
        self.kept_log_probs.append(float(kept[token]))
        self.versions.append(version)
        if self.is_aborted:
            self.reason = "abort"
        elif (token in ends and not self.sampling.get("ignore_eos")) or token in self.sampling["stop_token_ids"]:
            self.reason = "stop"
        elif len(self.token_ids) >= self.most:
            self.reason = "length"

    def _cut(self):
        return {name: self.sampling[name] for name in ("top_k", "top_p")}

    def experts(self):
        """[all tokens but the last, layers, top-k]: those that follow the token."""
        layers, topk, experts = self.sizes
        fed = np.array((self.prompt + self.token_ids)[:-1], dtype=np.int32)
        return (fed[:, None, None] + np.arange(layers)[:, None] + np.arange(topk)).astype(np.int32) % experts

    def news(self):
        """An answer with what was not told of yet; None if it is not time to tell, by the rules of such a stream."""
        new = len(self.token_ids) - self.told
        if not self.reason and new < self.sampling["stream_interval"] and (self.told or not new):
            return None
        answer = self.answer()
        about = answer["meta_info"]
        for key in about.keys() & _TOLD_OF_TOKENS:
            about[key] = about[key][self.told :]
        answer["output_ids"] = self.token_ids[self.told :]
        self.told, self.is_told = len(self.token_ids), self.reason is not None
        return answer

    def waiting_aborted(self):
        """The last answer of a sample that ends as it waits: the last token told again, and all log-probs."""
        for values in (self.token_ids, self.log_probs, self.kept_log_probs, self.versions):
            del values[self.told :]
        answer = self.answer()
        answer["output_ids"] = self.token_ids[-1:]
        return answer

    def answer(self):
        spans = []
        for place, version in enumerate(self.versions):
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = place + 1
            else:
                spans.append({"version": version, "start": place, "end": place + 1})
        about = {
            "completion_tokens": len(self.token_ids),
            "finish_reason": {"type": self.reason} if self.reason else None,
            "weight_versions": spans,
            # JSON has no NaN.
            "output_token_logprobs": [
                [log_prob if np.isfinite(log_prob) else None, token, None]
                for log_prob, token in zip(self.log_probs, self.token_ids, strict=True)
            ],
        }
        if self.asked["return_sampling_mask"]:
            about["output_token_sampling_logprobs"] = self.kept_log_probs
            about["output_token_sampling_mask"] = [[token] for token in self.token_ids]
        if self.asked.get("return_routed_experts") and self.sizes and self.reason:
            about["routed_experts"] = base64.b64encode(self.experts().tobytes()).decode()
        return {"output_ids": self.token_ids, "meta_info": about}
