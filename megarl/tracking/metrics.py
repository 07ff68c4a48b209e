"""The metrics: the table from which docs/metrics.md is generated.

A logger accepts any name. A name with <angle brackets> stands for one metric per stage, phase, part or data source.
"""

from typing import NamedTuple


class Metric(NamedTuple):
    """One metric, logged once per step unless stated otherwise."""

    name: str
    unit: str
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric(
        "reward/mean",
        "",
        "mean reward of the step's responses, also of those in groups that algorithm.dynamic_sampling or filter_groups "
        "leaves out: as of all reward/*, groups/* and response_length/*",
    ),
    Metric("reward/std", "", "standard deviation of the rewards over the step's responses"),
    Metric("reward/max", "", "largest reward"),
    Metric("reward/min", "", "smallest reward"),
    Metric("reward/source/<name>/mean", "", "mean reward of the responses to the prompts of one data source"),
    Metric(
        "reward/dropped", "responses", "left out as they have no score (reward.on_error=drop, reward.on_timeout=drop)"
    ),
    Metric("reward/timed_out", "responses", "scoring took longer than reward.timeout_s (see reward.on_timeout)"),
    Metric("reward/timed_out_fraction", "", "share of the responses whose scoring took longer than reward.timeout_s"),
    Metric(
        "reward/undecided_fraction",
        "",
        "share of the responses whose scoring took too long, or that a built-in reward gave up (its part unchecked)",
    ),
    Metric("reward/lost", "responses", "left out because every process that scored them was killed"),
    Metric("reward/part/<name>", "", "mean of a number that the reward function gave beside its score"),
    Metric("response_length/mean", "tokens", "mean length of a response, its end token included"),
    Metric("response_length/max", "tokens", "longest response"),
    Metric("response_length/min", "tokens", "shortest response"),
    Metric("response_length/median", "tokens", "half of the responses are no longer"),
    Metric("response_length/p90", "tokens", "nine of ten responses are no longer"),
    Metric("response_length/p99", "tokens", "99 of 100 responses are no longer"),
    Metric("response_length/histogram", "tokens", "all lengths, in equal bins up to rollout.max_response_tokens"),
    Metric("response_length/truncated_fraction", "", "share of responses that ran into rollout.max_response_tokens"),
    Metric(
        "groups/no_signal",
        "",
        "share of groups whose rewards are all equal, and give no advantage where they are compared with each other: 1 "
        "with loop.samples_per_prompt=1",
    ),
    Metric(
        "groups/rounds",
        "",
        "prompts sampled for the step, in rounds of prompts_per_step: above 1 with dynamic_sampling",
    ),
    Metric(
        "groups/left_out",
        "",
        "share of groups not trained on (algorithm.dynamic_sampling, filter_groups, or too few responses)",
    ),
    Metric("groups/all_right", "", "share of groups whose rewards are all above 0.5"),
    Metric("groups/all_wrong", "", "share of groups without a reward above 0.5"),
    Metric("advantage/mean", "", "mean advantage of the trained tokens"),
    Metric(
        "advantage/response_mean",
        "",
        "mean over the trained responses: away from 0 where truncated ones are in the statistics and not trained on",
    ),
    Metric("advantage/std", "", "standard deviation of the advantages over the trained tokens"),
    Metric("advantage/max", "", "largest advantage"),
    Metric("advantage/min", "", "smallest advantage"),
    Metric("advantage/positive_fraction", "", "share of trained tokens with an advantage above 0"),
    Metric("advantage/zero_fraction", "", "share of trained tokens whose advantage is exactly 0"),
    Metric("policy/loss", "", "what the optimizer minimises, all terms and coefficients included"),
    Metric(
        "policy/entropy",
        "nats",
        "mean entropy of the policy over the response tokens, at rollout.temperature, without its top_p and top_k",
    ),
    Metric("policy/kl_to_reference", "nats", "estimated KL of the policy to the reference model, mean over tokens"),
    Metric(
        "policy/kl_coefficient", "", "weight of the KL to the reference in this step (algorithm.kl_target adapts it)"
    ),
    Metric(
        "policy/kl_to_old",
        "nats",
        "estimated KL of the policy of algorithm.ratio_to, whose tokens they are, to the present one, mean over tokens "
        "(k3)",
    ),
    Metric("policy/clip_fraction", "", "share of response tokens whose probability ratio was clipped"),
    Metric("policy/clip_fraction_low", "", "share clipped at 1 - clip_low"),
    Metric("policy/clip_fraction_high", "", "share clipped at 1 + clip_high"),
    Metric("policy/clip_fraction_dual", "", "share with a negative advantage and a ratio above the loss's dual_clip"),
    Metric("policy/chosen_fraction", "", "share of tokens chosen by their covariance (clip_cov, kl_cov)"),
    Metric("policy/ratio_capped", "", "share of tokens whose ratio is above the ratio_cap of dppo"),
    Metric("policy/off_policy_masked", "", "share of response tokens that algorithm.off_policy_mask leaves out"),
    Metric("policy/ratio_mean", "", "mean probability ratio of the policy to the one of algorithm.ratio_to"),
    Metric("policy/ratio_max", "", "largest such ratio of the step"),
    Metric("policy/ratio_histogram", "", "all such ratios, in bins that are finer towards 1"),
    Metric("policy/gradient_norm", "", "norm of the whole gradient before it is clipped"),
    Metric("policy/learning_rate", "", "learning rate of the step's last optimizer step"),
    Metric(
        "mtp/loss/<layer>",
        "nats",
        "mean -log p of the trained tokens (in pairs the chosen ones) by each layer for multi-token prediction",
    ),
    Metric(
        "mtp/accuracy/<layer>",
        "",
        "share of these tokens that were the layer's first choice: what speculative decoding would have accepted of a"
        " greedy draft, if it had come to this layer",
    ),
    Metric("experts/imbalance_mean", "", "load of a layer's busiest expert over the mean load, mean over layers"),
    Metric("experts/imbalance_max", "", "the same of the layer in which it is largest"),
    Metric("experts/imbalance/<layer>", "", "the same of each layer that has experts: layer_0 is the model's first"),
    Metric(
        "experts/load/<layer>",
        "tokens",
        "a histogram of the experts of each such layer: bin i has the tokens that expert i got, prompts included and "
        "padding not",
    ),
    Metric(
        "experts/<loss>",
        "",
        "value of each loss of the routers (z_loss, seq_aux_loss, global_aux_loss), without its coefficient, mean over"
        " layers; where megatron.moe_z_loss_coeff or moe_aux_loss_coeff adds it",
    ),
    Metric("experts/idle_fraction", "", "share of experts, over all layers, that got no token in the step"),
    Metric(
        "experts/changed_by_replay",
        "",
        "share of the engine's choices, each of a token in a layer, instead of which the trainer's router would "
        "have chosen other experts; with algorithm.router_replay=rollout",
    ),
    Metric("experts/tokens_changed_by_replay", "", "share of the replayed tokens with such a choice in any layer"),
    Metric(
        "experts/gap_replayed",
        "nats",
        "mean |engine - trainer| log-probability before the step's update, of the trained tokens of at most 32 "
        "responses that the weights of now sampled, by the engine's routing; with algorithm.router_replay=rollout, "
        "where there are such tokens",
    ),
    Metric("experts/gap_own_routing", "nats", "the same of the same tokens, by the trainer's own routing"),
    Metric(
        "log_prob_difference/mean",
        "nats",
        "mean |engine - trainer| log-probability of the sampled tokens; not with algorithm.ratio_to=rollout and "
        "several updates, where off_policy/* have it together with the policy's way",
    ),
    Metric("log_prob_difference/max", "nats", "largest such difference of the step"),
    Metric("correction/factor_mean", "", "mean factor of algorithm.corrections on a token's loss"),
    Metric("correction/masked_tokens", "", "share of tokens with the factor 0"),
    Metric("correction/masked_responses", "", "share of responses of which no token is left"),
    Metric("correction/effective_sample_size", "", "of the factors, as a share of the tokens: 1 if all are equal"),
    Metric(
        "off_policy/kl",
        "nats",
        "estimated KL of the sampler to the present policy, with the updates of the step so far; mean over tokens (k1)",
    ),
    Metric("off_policy/k3", "nats", "the same by k3, which is never negative"),
    Metric("off_policy/chi2_token", "", "chi-squared of the present policy to the sampler, over tokens"),
    Metric("off_policy/chi2_response", "", "the same over whole responses"),
    Metric(
        "off_policy/effective_sample_size", "", "of the ratios of present policy to sampler, as a share of the tokens"
    ),
    Metric("off_policy/perplexity", "", "mean perplexity of a response under the present policy"),
    Metric("off_policy/rollout_perplexity", "", "the same under the sampler"),
    Metric("off_policy/perplexity_ratio", "", "mean ratio of the first to the second"),
    Metric("off_policy/log_perplexity_difference_max", "nats", "largest |difference of a response's mean log-probs|"),
    Metric("value/loss", "", "what the critic's optimizer minimises"),
    Metric("value/mean", "", "mean value that the critic gives to a token"),
    Metric("value/return_mean", "", "mean return, which it is to give"),
    Metric("value/clip_fraction", "", "share of tokens for which critic.value_clip decides"),
    Metric("value/explained_variance", "", "1 - variance of the error / variance of the returns: 1 is perfect"),
    Metric("value/gradient_norm", "", "norm of the critic's gradient before it is clipped"),
    Metric("value/learning_rate", "", "the critic's learning rate"),
    Metric("prime/loss", "nats", "cross entropy of the implicit reward model, per response"),
    Metric("prime/accuracy", "", "share of responses whose outcome it tells"),
    Metric("prime/gradient_norm", "", "norm of its gradient before it is clipped"),
    Metric("prime/learning_rate", "", "its learning rate"),
    Metric("distillation/kl", "nats", "estimated KL of the policy to its teachers, mean over tokens"),
    Metric(
        "throughput/tokens_per_s",
        "tokens/s",
        "prompt and response tokens that are trained with, by the wall time of the step",
    ),
    Metric("throughput/tokens_per_s_per_gpu", "tokens/s", "the same by the GPUs of the run, engines' included"),
    Metric(
        "throughput/trainer_tflops",
        "TFLOP/s",
        "matrix products of the policy's passes, shared prefixes once, the output layer at every token, gradients of "
        "frozen weights and recomputation not counted, by the wall time of the stages in which its ranks compute, for "
        "one rank",
    ),
    Metric("throughput/mfu", "", "the same as a share of a GPU's peak in bfloat16 (`tracking.peak_tflops`)"),
    Metric("seconds/step", "s", "wall time of the step"),
    Metric(
        "seconds/<stage>",
        "s",
        "wall time of one stage: rollout, reward, log_probs (making the batch, and the passes before the update that "
        "give log-probs and values), advantage, update, refit, evaluate, checkpoint (the one of the step before, which "
        "follows its line); of `megarl dpo` and `megarl spin` also reference",
    ),
    Metric(
        "seconds/turns",
        "s",
        "wall time of handing over GPUs that trainer and engines share (a shared pool); it is in the overhead, too, or "
        "in the refit",
    ),
    Metric(
        "memory/<turn>",
        "bytes",
        "most that all processes held of a shared GPU in one turn of the step: engines, trainers or refit; without "
        "GPUs weights, gradients, optimizer states and caches on the machine, but no activations",
    ),
    Metric(
        "seconds/checkpoint_wait",
        "s",
        "wall time for which a save waited for the one before it to be written (`checkpoint.async_save`); it is in the "
        "checkpoint stage, too",
    ),
    Metric("seconds/overhead", "s", "wall time of the step outside all stages, logging included"),
    Metric("refit/direct", "", "1 if the step's weights went straight into the engines, 0 if through their loader"),
    Metric("refit/bytes", "bytes", "what the refit moved from the ranks to the engines"),
    Metric(
        "refit/changed",
        "",
        "with refit.delta, share of the weights that are not as the last refit left them, in units of 2 bytes: "
        "elements of bf16",
    ),
    Metric("refit/repeated", "", "1 if the transfer failed and was made again"),
    Metric("refit/log_prob_difference", "nats", "largest mean of a response in the check of refit.verify=logprobs"),
    Metric("engines/restarts", "", "how many times in this run an engine died and was restarted"),
    Metric(
        "engines/failed_starts",
        "",
        "how many times since the last step an engine that died did not come back, and is started once more",
    ),
    Metric("engines/down", "", "engines that died and do not serve again yet, at the end of the step"),
    Metric("engines/seconds_down", "s", "longest time from a death to serving again, of the engines that came back"),
    Metric(
        "throughput/engines_idle",
        "",
        "share of the step in which an engine had nothing to sample, mean over the engines",
    ),
    Metric(
        "throughput/prefix_cached_first_turns",
        "",
        "share of the prompts' tokens that engines had keys and values of, in their prefix caches",
    ),
    Metric(
        "throughput/prefix_cached_later_turns", "", "the same of all that comes before a turn which is not the first"
    ),
    Metric("engines/running", "samples", "samples that go on after a step of an engine, mean over steps and engines"),
    Metric("engines/waiting", "samples", "the most samples that were in an engine and had no room there"),
    Metric(
        "engines/kv_used",
        "",
        "the most that was in use of an engine's room for keys and values, a share; near 1, samples are computed again",
    ),
    Metric("engines/tokens_moved", "tokens", "what was computed again since its engine died or slept"),
    Metric(
        "engines/tokens_preempted",
        "tokens",
        "what engines computed again since room for keys and values ran out, and none was left of it in prefix caches",
    ),
    Metric(
        "refit/tokens_recomputed", "tokens", "what engines computed again for responses in flight (schedule.in_flight)"
    ),
    Metric("throughput/trainer_idle", "", "share of the step in which the loop waited for responses and their rewards"),
    Metric("schedule/length_sampled", "tokens", "mean length of all responses that were sampled and scored in the run"),
    Metric(
        "schedule/length_trained",
        "tokens",
        "the same of those in a batch: less where long responses are trained on less often",
    ),
    Metric("schedule/dropped_equal", "groups", "dropped since the last batch as they teach nothing (dynamic_sampling)"),
    Metric("schedule/dropped_unscored", "groups", "the same, as none of their responses has a score"),
    Metric("schedule/groups_in_flight", "", "groups that were being sampled or scored when the step had ended"),
    Metric("schedule/groups_waiting", "", "groups that were finished then, and waited for their batch"),
    Metric("staleness/mean", "versions", "how many versions behind the newest weights a response's oldest token is"),
    Metric("staleness/max", "versions", "the same of the oldest response"),
    Metric("staleness/in_flight", "versions", "how many versions came while a response was sampled, in the mean"),
    Metric("staleness/in_queue", "versions", "how many came from its last token to the batch that it is trained in"),
    Metric(
        "staleness/kept_kv_gap",
        "nats",
        "with schedule.in_flight=keep: mean |engine - trainer| log-prob of tokens that the newest weights sampled in "
        "responses which older ones began, whose keys and values they keep; null where there are none",
    ),
    Metric(
        "eval/accuracy",
        "",
        "mean reward of the responses to the held-out prompts (see loop.eval_samples); only where evaluated",
    ),
    Metric("eval/dropped", "responses", "held-out responses whose reward function failed (reward.on_error=drop)"),
    Metric("eval/truncated_fraction", "", "share of held-out responses that ran into rollout.max_response_tokens"),
    Metric("eval/response_length", "tokens", "mean length of a held-out response"),
    Metric("eval/mean_at_<k>", "", "mean@k: mean reward of k = loop.eval_samples responses"),
    Metric("eval/pass_at_<k>", "", "pass@k: chance that at least one of k responses has a reward above 0.5"),
    Metric("eval/majority_at_<k>", "", "majority@k: expected reward of the answer that most of k responses give"),
    Metric("eval/best_at_<k>", "", "best@k: expected reward of the best of k responses"),
    Metric(
        "eval/source/<name>/<metric>", "", "accuracy, or the four above, of one data source where there are several"
    ),
    Metric("warning/<alert>", "", "1 while the run is warned of it, else 0: see below"),
    Metric("sft/loss", "nats", "mean cross entropy per assistant token (`megarl sft`)"),
    Metric("sft/token_accuracy", "", "share of assistant tokens that are the most likely ones (`megarl sft`)"),
    Metric("sft/eval_<name>", "", "either of these, of the held-out conversations"),
    Metric(
        "sft/exact_match",
        "",
        "share of held-out conversations whose replies greedy decoding reproduces, all of them (`megarl sft`)",
    ),
    Metric("preference/loss", "nats", "loss per pair (`megarl dpo`, `megarl reward-model`, `megarl spin`)"),
    Metric("preference/accuracy", "", "share of pairs whose better reply is preferred"),
    Metric("preference/margin", "", "mean margin of the better reply: of beta times the log-ratios, or of the scores"),
    Metric("preference/chosen_log_ratio", "nats", "mean log-ratio of the better reply to the reference"),
    Metric("preference/rejected_log_ratio", "nats", "mean log-ratio of the worse reply to the reference"),
    Metric("preference/chosen_score", "", "mean score of the better reply (`megarl reward-model`)"),
    Metric("preference/rejected_score", "", "mean score of the worse reply (`megarl reward-model`)"),
    Metric("preference/eval_<name>", "", "any of these, of the held-out pairs"),
    Metric("spin/equal", "", "share of the policy's own replies that equal the human one (`megarl spin`)"),
    Metric("spin/exact_match", "", "as `sft/exact_match`, of the held-out conversations of `megarl spin`"),
)
