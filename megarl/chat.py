"""Chat with a model: an engine loads a HuggingFace folder, and answers are streamed as they are sampled."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from converters.errors import UserError
from megarl.cluster.engines.engine_group import EngineGroup
from megarl.data.chat import encode, render
from megarl.data.detokenizer import Detokenizer
from megarl.models.context import known_context
from megarl.models.policy import check_cut, check_ends, read_model
from megarl.rollout.protocol import Request, SamplingParameters
from megarl.run.opening import open_processes
from megarl.schema import MegarlConfig


class Conversation:
    """A conversation, and the token ids of its next prompt.

    Messages are rendered by the tokenizer's chat template, or joined as plain text if it has none. Raises UserError
    for a system message without a template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> None:
        self._tokenizer = tokenizer
        if system is not None and not self.has_template:
            raise UserError(f"--system needs a chat template, and the tokenizer of {tokenizer.name_or_path} has none")
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.reset()

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template, so that the prompt says who said what."""
        return self._tokenizer.chat_template is not None

    def prompt(self, question: str) -> list[int]:
        """Token ids of the conversation so far plus `question`. Raises UserError if the template refuses it."""
        messages = [*self._messages, {"role": "user", "content": question}]
        if not self.has_template:
            return self._tokenizer("".join(message["content"] for message in messages))["input_ids"]
        text = render(self._tokenizer, messages, "the conversation", add_generation_prompt=True)
        return next(encode(self._tokenizer, [text]))

    def add(self, question: str, answer: str) -> None:
        """Remember a question and its answer."""
        self._messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Forget all but the system message."""
        self._messages = list(self._first)


class Chat:
    """A conversation with the model of an engine."""

    def __init__(
        self,
        engines: EngineGroup,
        conversation: Conversation,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParameters,
        longest: int,
    ) -> None:
        self.conversation = conversation
        self._engines, self._tokenizer, self._sampling, self._longest = engines, tokenizer, sampling, longest

    def answer(self, question: str, is_stopped: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Stream the model's answer, piece by piece, and add question and answer to the conversation.

        `is_stopped` is polled after each piece; when it returns True the request is aborted, and the conversation keeps
        the part of the answer that was sampled.

        Raises UserError if the template or the engine refuses the prompt, or if it leaves no room for an answer; the
        conversation is unchanged then.
        """
        prompt = self.conversation.prompt(question)
        left = self._longest - len(prompt)
        if left < 1:
            raise UserError(f"the conversation is of {len(prompt)} tokens, and the model takes {self._longest}")
        request = Request(prompt, replace(self._sampling, max_tokens=min(self._sampling.max_tokens, left)))
        detokenizer, said, stopped = Detokenizer(self._tokenizer), "", False
        for token_ids in self._engines.generate_stream(request):
            said += (piece := detokenizer.add(token_ids))
            yield piece
            if not stopped and is_stopped():
                stopped = True
                self._engines.pause("abort")
                self._engines.resume()
        said += (piece := detokenizer.end())
        self.conversation.add(question, said)
        yield piece


@contextmanager
def open_chat(config: MegarlConfig, system: str | None, temperature: float) -> Iterator[Chat]:
    """Start an engine with the model of `config`; it ends with the context.

    Raises UserError for a model that cannot be loaded, and for a system message without a chat template.
    """
    model = read_model(config.model, config.rollout.stop_token_ids)
    check_ends(model)
    check_cut(model.without_prediction_layers, config.rollout)
    conversation = Conversation(model.tokenizer, system)
    sampling = SamplingParameters(
        temperature=temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        max_tokens=config.rollout.max_response_tokens,
        stop_token_ids=model.stop_token_ids,
    )
    with open_processes(config, {}, engines=True) as processes:
        engines = processes.engines_with(model)
        yield Chat(engines, conversation, model.tokenizer, sampling, known_context(config))
