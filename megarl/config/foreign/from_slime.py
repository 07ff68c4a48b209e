"""`megarl config --from-slime`: a recipe equivalent to a slime script, and what has no counterpart."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from converters.errors import UserError, did_you_mean
from megarl.config.foreign import slime_flags as slime
from megarl.config.foreign.arguments import Argument, number_or_text, read_arguments
from megarl.config.foreign.engine_arguments import OF_SLIME, TENSOR_PARALLEL
from megarl.config.foreign.megatron_script import MegatronScript, check_model, translate
from megarl.config.foreign.programs import SLIME, Trainer
from megarl.config.foreign.recipe import (
    OPEN,
    SAMPLED_FROM_ALL,
    WITHOUT_LIMIT,
    TranslatedRecipe,
    steps_of_epochs,
)
from megarl.rollout import ENGINES


def from_slime(file: Path, environment: Mapping[str, str]) -> TranslatedRecipe:
    """Translate a script. Raises UserError for an argument that neither slime nor Megatron-LM has."""
    found = read_arguments(file, environment, SLIME.counts)
    trainer = SLIME.trainer(found.program)
    translation = _Translation({argument.name: argument for argument in found.arguments}, trainer)
    for part in (_algorithm, _kl, _batch, _data, _evaluation, _length, _engines, _cluster, _rest):
        part(translation)
    translation.recipe.absent.update(found.uncertain)
    return translation.recipe


class _Translation:
    """Translates slime's arguments, one by one, into a recipe."""

    def __init__(self, given: Mapping[str, Argument], trainer: Trainer) -> None:
        self.given = given
        self.trainer = trainer
        self.recipe = TranslatedRecipe()
        self.taken: set[str] = set()

    def take(self, name: str) -> Any:
        """Consume an argument and return its value, or else slime's default; true for one without a value."""
        self.taken.add(name)
        if name not in self.given:
            return slime.DEFAULTS.get(name)
        words = self.given[name].words
        return number_or_text(words[0]) if words else True

    def absent(self, name: str, why: str) -> None:
        """Note that a given argument has no counterpart."""
        self.taken.add(name)
        self.recipe.absent.setdefault(why, []).append(shown(self.given[name]))


def shown(argument: Argument) -> str:
    """The argument as written in the script."""
    values = " ".join(value.unknown or value.text for value in argument.values)
    return f"{argument.flag} {values}".rstrip()


def _algorithm(t: _Translation) -> None:
    if t.take("loss_type") == "sft_loss":
        raise UserError(
            "--loss-type sft_loss is supervised fine-tuning, which is megarl sft here: only RL is translated"
        )
    name = t.take("advantage_estimator")
    if name not in slime.ADVANTAGES:
        raise UserError(
            f"--advantage-estimator {name} has no counterpart, there are {', '.join(slime.ADVANTAGES)}"
            f"{did_you_mean(str(name), slime.ADVANTAGES)}; change it, then translate again"
        )
    advantage, loss = slime.ADVANTAGES[name]
    t.recipe.set("algorithm.advantage", advantage)
    t.recipe.set("algorithm.policy_loss", loss)
    gamma, lambd = t.take("gamma"), t.take("lambd")
    if advantage == "gae":
        t.recipe.set("algorithm.advantage_options", {"gamma": gamma, "gae_lambda": lambd})
        _critic(t)
    elif advantage == "reinforce_plus_plus":
        t.recipe.set("algorithm.advantage_options", {"gamma": gamma})
    elif advantage == "grpo" and t.take("disable_grpo_std_normalization"):
        t.recipe.set("algorithm.advantage_options", {"normalize_by_std": False})
    if advantage in slime.WHITENED:
        _whitening(t, advantage)
    low = t.take("eps_clip")
    high = t.take("eps_clip_high")
    options = {"clip_low": low, "clip_high": low if high is None else high}
    if (dual := t.take("eps_clip_c")) is not None and loss == "clip":
        options["dual_clip"] = dual
    t.recipe.set("algorithm.policy_loss_options", options)
    per_token = t.take("calculate_per_token_loss")
    t.recipe.set("algorithm.aggregation", "token_mean" if per_token else "seq_mean_token_mean")
    high = t.take("tis_clip")
    if t.take("use_tis") and loss == "gspo":
        t.absent(
            "use_tis", "a loss with one ratio per response has corrections of whole responses: sequence_mean_importance"
        )
    elif t.take("use_tis"):
        low = t.take("tis_clip_low")
        bounds = {"high": high} if not low else {"low": low, "high": high}
        t.recipe.set("algorithm.corrections", [{"kind": "token_importance", **bounds}])
    if path := t.take("dynamic_sampling_filter_path"):
        if str(path).endswith("check_reward_nonzero_std"):
            t.recipe.set("algorithm.dynamic_sampling", True)
            t.recipe.set("algorithm.max_refills", WITHOUT_LIMIT)
        else:
            t.absent("dynamic_sampling_filter_path", "algorithm.filter_on, filter_low and filter_high say which groups")


def _whitening(t: _Translation, advantage: str) -> None:
    if t.take("normalize_advantages"):
        why = f"{advantage} always whitens advantages"
        t.recipe.always.setdefault(why, []).append(shown(t.given["normalize_advantages"]))
    else:
        t.absent("advantage_estimator", f"{advantage} whitens advantages here, as with --normalize-advantages there")


def _critic(t: _Translation) -> None:
    for name, key in slime.CRITIC.items():
        if (value := t.take(name)) is not None:
            t.recipe.set(key, value)
    nodes, gpus = map(t.take, slime.CRITIC_RANKS)
    if nodes and gpus:
        t.recipe.set("critic.ranks", nodes * gpus)


def _kl(t: _Translation) -> None:
    in_loss, in_reward, kind = t.take("kl_loss_coef"), t.take("kl_coef"), t.take("kl_loss_type")
    in_loss = in_loss if t.take("use_kl_loss") else 0.0
    if in_reward and (why := slime.OTHER_KL_IN_REWARD.get(t.recipe.get("algorithm.advantage"))):
        t.absent("kl_coef", why)
        in_reward = 0.0
    if t.take("use_unbiased_kl") and in_loss:
        t.recipe.set("algorithm.kl_unbiased", True)
    elif "use_unbiased_kl" in t.given:
        why = "there is no KL in the loss, which it would weigh"
        t.recipe.always.setdefault(why, []).append(shown(t.given["use_unbiased_kl"]))
    if not in_loss and not in_reward:
        return
    t.recipe.set("algorithm.kl_coefficient", in_loss or in_reward)
    t.recipe.set("algorithm.kl_in", "loss" if in_loss else "reward")
    t.recipe.set("algorithm.kl_estimator", slime.KL_ESTIMATORS.get(kind, kind))


def _batch(t: _Translation) -> None:
    samples = t.take("n_samples_per_prompt")
    t.recipe.set("loop.samples_per_prompt", samples)
    responses = (t.take("rollout_batch_size") or 0) * samples
    batch, updates = t.take("global_batch_size"), t.take("num_steps_per_rollout")
    if batch and responses % batch:
        raise UserError(
            f"{responses} responses of --rollout-batch-size x --n-samples-per-prompt cannot be cut into batches of"
            f" --global-batch-size {batch}: change one of them"
        )
    t.recipe.set("algorithm.updates_per_step", updates or (responses // batch if batch else 1))
    context = t.given.get("context_parallel_size")
    parts = int(context.words[0]) if context else 1
    longest = (t.take("rollout_max_prompt_len") or 1024) + (t.take("rollout_max_response_len") or 1024)
    tokens = (t.take("max_tokens_per_gpu") or 0) * parts
    t.recipe.set("loop.max_tokens_per_micro_batch", max(tokens, longest))


def _data(t: _Translation) -> None:
    for name, key in (("prompt_data", "data.train_files"), ("eval_prompt_data", "data.eval_files")):
        if name not in t.given:
            continue
        files = [word for word in t.given[name].words if "/" in word or "." in word]
        if all(file.endswith(".parquet") for file in files):
            t.taken.add(name)
            t.recipe.set(key, files)
        else:
            t.recipe.set(key, OPEN)
            t.absent(name, slime.ABSENT["label_key"])
    if t.take("rollout_max_prompt_len") is not None:
        t.recipe.set("data.overlong_prompts", "drop")
    _reward(t)
    if t.take("use_wandb"):
        t.recipe.set("tracking.loggers", ["console", "jsonl", "tensorboard", "wandb"])


def _reward(t: _Translation) -> None:
    reward = t.take("rm_type")
    if reward == "dapo" and not ("reward_key" in t.given and t.given["reward_key"].words == ["acc"]):
        # A KL in the reward, copied unchanged, counts the same only if right and wrong are as far apart as in slime.
        t.recipe.weigh_twice(slime.REWARDS[reward], [shown(t.given["rm_type"])], "slime")
    elif reward in slime.REWARDS:
        t.recipe.set("reward.function", slime.REWARDS[reward])
        if reward in slime.ANSWER_AFTER:
            t.recipe.set("reward.answer_after", slime.ANSWER_AFTER[reward])
    elif reward:
        t.recipe.set("reward.function", OPEN)
        t.absent("rm_type", slime.ABSENT["rm_type"])


def _evaluation(t: _Translation) -> None:
    """Translate evaluation: slime samples held-out responses as it samples rollouts, even one response per prompt."""
    samples = t.take("n_samples_per_eval_prompt")
    # An evaluation option that is not given defaults to that of the rollout.
    name_of = {
        option: f"eval_{option}" if t.take(f"eval_{option}") is not None else f"rollout_{option}"
        for option in ("temperature", "top_p", "top_k")
    }
    temperature = 0 if t.take(name_of["top_k"]) == 1 else t.take(name_of["temperature"])
    t.recipe.evaluate_with(samples, temperature, [f"--n-samples-per-eval-prompt {samples}"])
    for option, all_tokens in slime.ALL_TOKENS.items():
        if t.take(name := name_of[option]) not in (None, all_tokens) and temperature:
            t.absent(name, SAMPLED_FROM_ALL)
    for name, (of_rollouts, why) in slime.EVAL_LIMITS.items():
        if (limit := t.take(name)) == t.take(of_rollouts) and limit is not None:
            t.recipe.always.setdefault(why, []).append(shown(t.given[name]))
        elif limit is not None:
            t.absent(name, why)


def _length(t: _Translation) -> None:
    """Translate the number of steps and the checkpoints, all of which slime keeps."""
    epochs, prompts = t.take("num_epoch"), t.take("rollout_batch_size")
    if "num_rollout" not in t.given:
        files = t.recipe.get("data.train_files")
        t.recipe.set("loop.steps", steps_of_epochs(files, epochs, prompts) if epochs and prompts else OPEN)
    elif epochs:
        t.recipe.always.setdefault("--num-rollout says it", []).append(shown(t.given["num_epoch"]))
    if every := t.take("save_interval"):
        t.recipe.set("checkpoint.keep_every", every)
    t.recipe.set("data.shuffle", False)
    t.recipe.set("loop.seed", t.take("rollout_seed"))


def _engines(t: _Translation) -> None:
    engine, prefix = OF_SLIME
    t.recipe.set("rollout.engine", engine)
    t.recipe.set(f"rollout.engine_args.{TENSOR_PARALLEL[engine]}", t.take("rollout_num_gpus_per_engine"))
    left_out: dict[str, str] = {}
    names = [each for each in t.given if each.startswith(prefix) and not _beginning(each)]
    # Arguments that decide whether others are left out come before them.
    for name in sorted(names, key=lambda each: each not in slime.ABSENT_WITH):
        argument = t.given[name]
        if why := next((why for start, why in left_out.items() if name.startswith(start)), ""):
            t.absent(name, why)
            continue
        if argument.unknown.startswith("$("):
            t.absent(name, "its value is computed by the script")
            continue
        values = [number_or_text(word) for word in argument.words]
        t.taken.add(name)
        value = True if not values else values[0] if len(values) == 1 else values
        try:
            ENGINES[engine].check({(own := name.removeprefix(prefix)): value})
        except UserError as error:
            t.absent(name, error.sentence)
            left_out |= dict.fromkeys(slime.ABSENT_WITH.get(name, ()), error.sentence)
        else:
            t.recipe.set(f"rollout.engine_args.{own}", value)


def _cluster(t: _Translation) -> None:
    nodes, gpus = t.take("actor_num_nodes"), t.take("actor_num_gpus_per_node")
    size = t.recipe.get(f"rollout.engine_args.{TENSOR_PARALLEL[OF_SLIME[0]]}")
    t.recipe.set("cluster.trainer_ranks", nodes * gpus)
    colocated = t.take("colocate")
    if t.trainer.samples_ahead:
        if colocated:
            raise UserError("train_async.py does not run with --colocate: leave it out, or name train.py")
        t.recipe.sample_ahead()
    engines = nodes * gpus if colocated else t.take("rollout_num_gpus") or nodes * gpus
    if engines % size:
        raise UserError(f"{engines} GPUs cannot be shared out among engines of {size}: change one of the two")
    t.recipe.set("rollout.replicas", engines // size)
    if colocated:
        roles = ["trainer", "engine", *(["critic"] if t.recipe.get("algorithm.advantage") == "gae" else [])]
        t.recipe.set("cluster.pools.all", {"roles": roles, "nodes": nodes, "shared": True})


def _rest(t: _Translation) -> None:
    """Translate the arguments with the same meaning here, and Megatron's."""
    script = MegatronScript()
    for name, argument in t.given.items():
        if (key := slime.SAME.get(name)) is not None:
            t.taken.add(name)
            may_be_open = key in ("model.path", "output_dir", "tracking.project", "tracking.run_name")
            t.recipe.set(key, OPEN if argument.unknown and may_be_open else t.take(name))
        elif name in slime.LISTS:
            t.recipe.set(slime.LISTS[name], [number_or_text(word) for word in argument.words])
        elif name in slime.SWITCHES:
            t.recipe.set(*slime.SWITCHES[name])
        elif name in t.taken:
            continue
        elif name in slime.NEUTRAL and argument.words == [slime.NEUTRAL[name]]:
            t.recipe.always.setdefault("nothing is asked so", []).append(shown(argument))
        elif why := _of_either(slime.ALWAYS, name):
            t.recipe.always.setdefault(why, []).append(shown(argument))
        elif why := _of_either(slime.ABSENT, name) or _beginning(name):
            t.absent(name, why)
        elif name in slime.CRITIC or name in slime.CRITIC_RANKS:
            t.recipe.always.setdefault("this advantage has no critic", []).append(shown(argument))
        else:
            translate(argument, t.given.values(), script, slime.NAMES)
    for option in slime.OPTIMIZER:
        t.recipe.set(f"megatron.{option}", slime.DEFAULTS[option])
    for assignment in script.assignments:
        override = OverridesParser.create().parse_override(assignment.text)
        t.recipe.set_option(override.key_or_group, override.value(), assignment.origin.split()[-1])
    for why, flags in script.left_out.items():
        t.recipe.always.setdefault(why, []).extend(flags)
    t.recipe.decay_over_the_whole_run(f"--num-critic-only-steps {t.recipe.get('critic.warmup_steps')}")
    _compare(t, script.model)


def _of_either(table: Mapping[str, str], name: str) -> str:
    """The text for an argument, or for the one that it turns off; empty if there is none."""
    return table.get(name) or table.get(name.removeprefix("disable_").removeprefix("no_"), "")


def _beginning(name: str) -> str:
    return next((why for start, why in slime.ABSENT_BEGINNINGS.items() if name.startswith(start)), "")


def _compare(t: _Translation, model: list[Argument]) -> None:
    """Compare what the script says about the model with config.json, if that is available."""
    path = t.recipe.get("model.path", OPEN)
    if path != OPEN and Path(str(path), "config.json").is_file():
        check_model(model, str(path))
    if model:
        t.recipe.always.setdefault("config.json says what the model is", []).extend(each.flag for each in model)
