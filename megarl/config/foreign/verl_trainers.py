"""Trainers of a verl command, the policy's and the critic's: options of Megatron and of the optimizer."""

from converters.errors import UserError
from megarl.config.foreign import verl_keys as verl
from megarl.config.foreign.verl_translation import ACTOR, Translation
from megatron_ext.options.arguments import megatron_fields


def megatron(t: Translation, group: str, prefix: str) -> None:
    """Translate parallel sizes and options of Megatron below `prefix`."""
    for name in verl.PARALLEL:
        if t.has(prefix + name):
            t.recipe.set(f"{group}.{name}", t.take(prefix + name))
    for override in verl.OVERRIDES:
        _overrides(t, group, prefix + override)


def _overrides(t: Translation, group: str, prefix: str) -> None:
    """Translate the options below `prefix`, all of which are Megatron's."""
    fields = megatron_fields()
    for name, value in t.below(prefix).items():
        if name == "moe_aux_loss_coeff" and value and not t.has(f"{prefix}moe_router_load_balancing_type"):
            t.absent(f"{prefix}{name}", "verl balances nothing unless moe_router_load_balancing_type says how")
        elif name not in fields:
            t.absent(f"{prefix}{name}", "the installed megatron-core has no such option")
        elif value is not None:
            t.recipe.set_option(f"{group}.{name}", value, f"{prefix}{name}={value}")


def optimizer(t: Translation) -> None:
    """Translate mini-batches and the policy's optimizer; requires the length of the run."""
    batch, mini = t.recipe.get("loop.prompts_per_step"), t.count(f"{ACTOR}ppo_mini_batch_size")
    if batch % mini:
        name = "train" if batch == t.take("data.train_batch_size") else "gen"
        raise UserError(
            f"data.{name}_batch_size={batch} cannot be cut into mini-batches of {ACTOR}ppo_mini_batch_size={mini}: give"
            " a batch that is a multiple of it"
        )
    t.recipe.set("algorithm.updates_per_step", batch // mini)
    _optimizer_options(t, "megatron", f"{ACTOR}optim.", batch // mini)


def _optimizer_options(t: Translation, group: str, prefix: str, updates: int) -> None:
    """Translate the options below `optim`; verl counts a schedule in rollouts, Megatron in optimizer steps."""
    for name in verl.OPTIMIZER:
        if (value := t.take(prefix + name)) is not None:
            t.recipe.set(f"{group}.{name}", value)
    for name in verl.COUNTED_IN_STEPS:
        if (value := t.take(prefix + name)) is not None and value > 0:
            t.recipe.set(f"{group}.{name}", value * updates)
    _warm_up(t, group, f"{prefix}lr_warmup_steps_ratio", updates)
    _decay(t, group, prefix)
    is_constant = t.recipe.get(f"{group}.lr_decay_style", "constant") == "constant"
    length = t.schedule_length
    if isinstance(length, int) and length != t.recipe.get("loop.steps") and not is_constant:
        t.recipe.set(f"{group}.lr_decay_steps", t.recipe.get(f"{group}.lr_decay_steps", length * updates))
    if betas := t.take(f"{prefix}betas"):
        t.recipe.set(f"{group}.adam_beta1", betas[0])
        t.recipe.set(f"{group}.adam_beta2", betas[1])
    _overrides(t, group, f"{prefix}override_optimizer_config.")


def _warm_up(t: Translation, group: str, key: str, updates: int) -> None:
    """Translate the warm-up that verl gives as a fraction of the run, unless it is given in steps."""
    if not (ratio := t.take(key)):
        return
    if t.recipe.get(f"{group}.lr_warmup_steps"):
        t.without_effect(key, "lr_warmup_steps says it")
    elif isinstance(steps := t.schedule_length, str):
        t.absent(
            key,
            f"the length of the run follows from data that is not here: lr_warmup_steps is this share of loop.steps,"
            f" times {updates}",
        )
    else:
        t.recipe.set(f"{group}.lr_warmup_steps", int(ratio * steps) * updates)


def _decay(t: Translation, group: str, prefix: str) -> None:
    """Translate the decay under the names of verl's FSDP and similar trainers, and the rate at the end of the run."""
    if t.take(style := f"{prefix}lr_scheduler_type"):
        t.recipe.set(f"{group}.lr_decay_style", t.choose(style, verl.DECAYS))
    if (first := t.take(f"{prefix}init_lr_ratio")) and t.recipe.get(f"{group}.lr_warmup_steps"):
        t.recipe.set(f"{group}.lr_warmup_init", first * t.recipe.get(f"{group}.lr"))
    if not (ratio := t.take(key := f"{prefix}min_lr_ratio")):
        return
    if t.recipe.get(f"{group}.lr_decay_style") in ("cosine", "linear"):
        t.recipe.set(f"{group}.min_lr", ratio * t.recipe.get(f"{group}.lr"))
    elif t.has(key):
        t.without_effect(key, "a constant rate has no end")


def critic(t: Translation) -> None:
    """Translate the critic, if the advantage has one, and its optimizer; requires the length of the run."""
    if t.recipe.get("algorithm.advantage") != "gae":
        for name in t.names_below("critic."):
            t.without_effect(f"critic.{name}", "this advantage has no critic")
        t.take("trainer.critic_warmup")
        return
    _optimizer_options(t, "critic.megatron", "critic.optim.", t.recipe.get("algorithm.updates_per_step"))
    megatron(t, "critic.megatron", "critic.megatron.")
    # A key that verl's critic does not set has verl's default there, but the policy's value here.
    for name in verl.PARALLEL:
        if t.recipe.get(f"megatron.{name}") not in (None, True) and not t.recipe.get(f"critic.megatron.{name}"):
            t.recipe.set(f"critic.megatron.{name}", None if name.startswith("virtual") else 1)
    for name, value in verl.OPTIMIZER_DEFAULTS.items():
        if t.recipe.get(f"megatron.{name}") is not None and t.recipe.get(f"critic.megatron.{name}") is None:
            t.recipe.set(f"critic.megatron.{name}", value)
    if (path := t.take("critic.model.path")) not in (None, t.recipe.get("model.path")):
        t.recipe.set("critic.path", path)
    mini = t.take(key := "critic.ppo_mini_batch_size")
    if mini is not None and mini != t.take(f"{ACTOR}ppo_mini_batch_size"):
        t.absent(key, "the critic has the policy's mini-batches")
    t.recipe.set("critic.value_clip", t.take("critic.cliprange_value"))
    # verl counts steps from 1, and starts to train the policy in the step with this number.
    warmup = t.take("trainer.critic_warmup") or 0
    if not isinstance(warmup, int):
        raise UserError(f"trainer.critic_warmup={warmup} is no number of steps: change it, then translate again")
    if warmup > 1:
        t.recipe.set("critic.warmup_steps", warmup - 1)
        t.recipe.decay_over_the_whole_run(f"trainer.critic_warmup={warmup}")
