# Everything runs in .venv, which `setup` creates on first use and checks on every later one.
PYTHON := .venv/bin/python
MODEL  ?= qwen3_moe
ENGINE ?=
WEIGHTS ?=
STEPS  ?=
OUTPUT ?=
# Number of test processes, twice that of two cores, since tests also wait. A file stays with one (tests/conftest.py); kept
# in order, so that the long files do not all come last.
TEST_WORKERS ?= 4

# Tests and jobs start hundreds of processes that import the same modules: compile each module only once.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup environment benchmark-setup test test-long test-cuda test-parallel test-sglang test-slurm test-megatron-next lint format docs quickstart benchmark benchmark-convert benchmark-refit benchmark-weight-changes benchmark-adapter-refit benchmark-join benchmark-forecast benchmark-plan benchmark-algorithms benchmark-log-probs benchmark-kernels benchmark-data-plane benchmark-router-replay benchmark-kv-scales benchmark-gaps benchmark-quickstarts benchmark-packing benchmark-train-step benchmark-schedules benchmark-schedules-real benchmark-faults benchmark-controller benchmark-engine-calls benchmark-engine-faults benchmark-checkpoint benchmark-collectives clean

help:
	@echo "make quickstart [MODEL=qwen3_moe|qwen3|deepseek_v3|smollm2] [ENGINE=vllm|sglang|transformers] [WEIGHTS=bf16|fp8_block|fp8_block_ue8m0|int8_channel|mxfp8|nvfp4] [SCHEDULE=async] [STEPS=n] [OUTPUT=folder]   the main job, on a tiny model"
	@echo "make test [TEST_WORKERS=4] [ARGS=...]   the tests"
	@echo "make test-long [ARGS=...]   the tests that take longest: runs that are killed and go on, further algorithms, two machines; --sample=3 --offset=2 for a third"
	@echo "make test-cuda [ARGS=...]   the tests that need one GPU or two; without, they say so"
	@echo "make test-parallel [ARGS=...]   every parallel layout beside one process; --sample=124 for one of 124, --page for their page of results"
	@echo "make test-sglang [TEST_WORKERS=2] [ARGS=...]   the tests that run SGLang's own server; --sample=3 for a third of those that take longest"
	@echo "make test-slurm [ARGS=...]   jobs of slurm/ on a real Slurm of two nodes, which they start; needs root, slurm-wlm and munge"
	@echo "make test-megatron-next [ARGS=...]   the tests of megatron_ext with the newest megatron-core that works"
	@echo "make lint              ruff and mypy; 'make format' rewrites"
	@echo "make setup [CUDA=1] [SGLANG=1]    .venv: the CPU stack, or the CUDA stack, which takes no GPU to install; SGLang beside it, in an environment of its own on CUDA"
	@echo "make docs              docs/configuration.md, docs/metrics.md and docs/options.md from the code"
	@echo "make benchmark [ARGS=...]   seconds per stage, beside TRL; --model smollm2_spread for a real model"
	@echo "make benchmark-convert [ARGS=...]   converting checkpoints, beside cp; with --shape narrow beside mbridge and megatron-bridge, too"
	@echo "make benchmark-refit [ARGS=...]     moving weights into an engine, beside memcpy, gathering and megatron-core"
	@echo "make benchmark-weight-changes [ARGS=...]   what a step changes in the weights"
	@echo "make benchmark-adapter-refit [ARGS=...]   bytes of a LoRA run's refit, merged and alone"
	@echo "make benchmark-join [ARGS=...]      how the ranks of a refit meet: seconds, connections, memory"
	@echo "make benchmark-forecast [ARGS=...]  refits on this machine, predicted and measured"
	@echo "make benchmark-plan [ARGS=...]     refits of 671B and 1T parameters, planned"
	@echo "make benchmark-algorithms [ARGS=...]   advantages of 33 million tokens, beside verl"
	@echo "make benchmark-log-probs [ARGS=...]    memory and time of log-probs, beside the plain computation"
	@echo "make benchmark-kernels [ARGS=...]      packing and quantising what a refit moves, beside a copy and plain torch"
	@echo "make benchmark-packing [ARGS=...]      how evenly sequences are dealt to ranks, beside Karmarkar-Karp"
	@echo "make benchmark-train-step [ARGS=...]   log-probs and an update, with shared prefixes and beside transformers"
	@echo "make benchmark-schedules [ARGS=...]    schedules that sample ahead, in virtual time"
	@echo "make benchmark-schedules-real [ARGS=...]   the same in runs, with a core for the engine and one for the trainer"
	@echo "make benchmark-controller [ARGS=...]   the controller's time and memory with thousands of trajectories in flight"
	@echo "make benchmark-engine-calls [ARGS=...]   requests that are submitted, their tokens told of on the way, beside one call"
	@echo "make benchmark-engine-faults [ARGS=...]  seconds from an abort to silence, from an engine's death to its return"
	@echo "make benchmark-faults [ARGS=...]   runs of which processes are killed at random moments"
	@echo "make benchmark-collectives [ARGS=...]  bytes that a rank sends under TP, CP, EP and PP, beside the formula"
	@echo "make benchmark-data-plane [ARGS=...]   what the data of a step costs the controller and the ranks"
	@echo "make benchmark-checkpoint [ARGS=...]   how long a run waits for a checkpoint, and for one that is written in the background"
	@echo "make benchmark-router-replay [ARGS=...]   how far engine and trainer differ by their choice of experts"
	@echo "make benchmark-kv-scales [ARGS=...]    keys and values in FP8 with scales of 1, calibrated ones and bounds"
	@echo "make benchmark-gaps [ARGS=...]         engine beside trainer after each refit, by model, engine and number format"
	@echo "make benchmark-quickstarts [ARGS=...]  whole quickstarts, by model, engine and number format: what they learn"

setup: environment $(if $(SGLANG),.venv-sglang)

environment:
	@python3 tools/setup_environment.py $(if $(CUDA),--cuda)

benchmark-setup:
	@python3 tools/setup_environment.py --benchmark

# Several tests share the cores, and so do a benchmark's programs: one math thread per process.
test benchmark-convert benchmark-refit benchmark-weight-changes benchmark-adapter-refit benchmark-join benchmark-forecast benchmark-plan benchmark-algorithms benchmark-log-probs benchmark-kernels benchmark-data-plane benchmark-router-replay benchmark-kv-scales benchmark-gaps benchmark-quickstarts benchmark-packing benchmark-train-step benchmark-schedules benchmark-controller benchmark-engine-calls benchmark-engine-faults benchmark-collectives: export OMP_NUM_THREADS ?= 1
test: setup
	$(PYTHON) -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Their runs already have many processes.
test-long: TEST_WORKERS = 2
test-long: export OMP_NUM_THREADS ?= 1
test-long: setup
	$(PYTHON) -m pytest -m "long and not sglang" --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-cuda: setup
	$(PYTHON) -m pytest -rs -m cuda $(ARGS) tests/cuda

test-parallel: export OMP_NUM_THREADS ?= 1
test-parallel: setup
	$(PYTHON) -m pytest -m parallel $(ARGS) tests/parallel

# Most of their time is spent on starting servers. A process takes one file at a time, and not, as in `test`, all files
# that share an engine.
test-sglang: TEST_WORKERS = 2
test-sglang: export OMP_NUM_THREADS ?= 1
test-sglang: setup .venv-sglang
	$(PYTHON) -m pytest -m sglang --timeout 600 --numprocesses $(TEST_WORKERS) --dist loadscope $(ARGS) tests/megarl/rollout tests/megarl/refit

test-slurm: export OMP_NUM_THREADS ?= 1
test-slurm: setup
	$(PYTHON) -m pytest -rs -m slurm $(ARGS) tests/slurm

# In a separate environment that no other target needs, as the newest megatron-core does not support every Python.
test-megatron-next: export OMP_NUM_THREADS ?= 1
test-megatron-next:
	@python3 tools/next_environment.py
	.venv-megatron-next/bin/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS) tests/megatron_ext

lint: setup
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy

format: setup
	$(PYTHON) -m ruff format .
	$(PYTHON) -m ruff check --fix .

docs: setup
	$(PYTHON) -m megarl.config.reference docs/configuration.md
	$(PYTHON) -m megarl.diagnostics.reference docs/metrics.md
	$(PYTHON) -m megarl.config.options_reference docs/options.md

# SGLang's versions of packages that differ from .venv's, in a separate folder that only its server sees. On CUDA they
# include another torch, so it is a whole environment.
PIP_FOR_SGLANG = -m pip install --quiet --no-deps --retries 10
# Scripts of a venv contain the path of the folder where it was created.
RENAMED_IN_SGLANG = grep --recursive --files-with-matches --binary-files=without-match '$@\.partial' $@.partial/bin | xargs sed --in-place 's|$@\.partial|$@|g'
.venv-sglang: constraints/sglang.txt constraints/sglang_cuda.txt | environment
	@printf '%s\n' "glibc 2.34" "$$(getconf GNU_LIBC_VERSION)" | sort --version-sort --check=quiet || { \
		echo "[setup] error: SGLang has no wheels for a glibc below 2.34; take a newer Linux, or a container: Dockerfile.cuda" >&2; exit 1; }
	rm -rf $@ $@.partial
	@if grep --quiet '"variant": "cuda"' .venv/megarl-setup.json; then \
		$(PYTHON) -m venv $@.partial && $@.partial/bin/python $(PIP_FOR_SGLANG) --requirement constraints/sglang_cuda.txt && \
			$(RENAMED_IN_SGLANG); \
	else $(PYTHON) $(PIP_FOR_SGLANG) --target $@.partial --requirement constraints/sglang.txt; fi || { rm -rf $@.partial; \
		echo "[setup] error: SGLang could not be installed, as pip says above; all else is there. Run the same command again" >&2; exit 1; }
	mv $@.partial $@
	touch $@

# Quotes a value as one shell word.
quoted = '$(subst ','\'',$(1))'

quickstart: setup $(if $(filter sglang,$(ENGINE)),.venv-sglang)
	$(PYTHON) -m megarl.cli.main quickstart --model $(call quoted,$(MODEL)) \
		$(if $(ENGINE),--engine $(call quoted,$(ENGINE))) $(if $(WEIGHTS),--weights $(call quoted,$(WEIGHTS))) \
		$(if $(SCHEDULE),--schedule $(call quoted,$(SCHEDULE))) $(if $(STEPS),--steps $(call quoted,$(STEPS))) \
		$(if $(OUTPUT),--output-dir $(call quoted,$(OUTPUT)))

benchmark: benchmark-setup
	$(PYTHON) benchmarks/step.py $(ARGS)

.venv-peers: constraints/conversion_peers.txt | setup
	rm -rf $@ $@.partial
	$(PYTHON) -m pip install --quiet --no-deps --target $@.partial --requirement $<
	mv $@.partial $@
	touch $@

.venv-algorithm-peers: constraints/algorithm_peers.txt | setup
	rm -rf $@ $@.partial
	$(PYTHON) -m pip install --quiet --no-deps --target $@.partial --requirement $<
	mv $@.partial $@
	touch $@

benchmark-convert: setup .venv-peers
	$(PYTHON) benchmarks/convert.py $(ARGS)

benchmark-refit: setup
	$(PYTHON) benchmarks/refit.py $(ARGS)

benchmark-weight-changes: setup
	$(PYTHON) benchmarks/weight_changes.py $(ARGS)

benchmark-adapter-refit: setup
	$(PYTHON) benchmarks/adapter_refit.py $(ARGS)

benchmark-join: setup
	$(PYTHON) benchmarks/join.py $(ARGS)

benchmark-forecast: setup
	$(PYTHON) benchmarks/forecast.py $(ARGS)

benchmark-plan: setup
	$(PYTHON) benchmarks/plan.py $(ARGS)

benchmark-algorithms: setup .venv-algorithm-peers
	$(PYTHON) benchmarks/algorithms.py $(ARGS)

benchmark-log-probs: setup
	$(PYTHON) benchmarks/log_probs.py $(ARGS)

benchmark-kernels: setup
	$(PYTHON) benchmarks/kernels.py $(ARGS)

benchmark-packing: setup
	$(PYTHON) benchmarks/packing.py $(ARGS)

benchmark-train-step: setup
	$(PYTHON) benchmarks/train_step.py $(ARGS)

benchmark-schedules: setup
	$(PYTHON) benchmarks/schedules.py $(ARGS)

benchmark-schedules-real: setup
	$(PYTHON) benchmarks/schedules_real.py $(ARGS)

benchmark-controller: setup
	$(PYTHON) benchmarks/controller.py $(ARGS)

benchmark-engine-calls: setup
	$(PYTHON) benchmarks/engine_calls.py $(ARGS)

benchmark-engine-faults: setup
	$(PYTHON) benchmarks/engine_faults.py $(ARGS)

benchmark-faults: setup
	$(PYTHON) benchmarks/faults.py $(ARGS)

benchmark-collectives: setup
	$(PYTHON) benchmarks/collectives.py $(ARGS)

benchmark-data-plane: setup
	$(PYTHON) benchmarks/data_plane.py $(ARGS)

benchmark-checkpoint: setup
	$(PYTHON) benchmarks/checkpoint.py $(ARGS)

benchmark-router-replay: setup .venv-sglang
	$(PYTHON) benchmarks/router_replay.py $(ARGS)

benchmark-kv-scales: setup
	$(PYTHON) benchmarks/kv_scales.py $(ARGS)

benchmark-gaps: setup
	$(PYTHON) benchmarks/gaps.py $(ARGS)

benchmark-quickstarts: setup .venv-sglang
	$(PYTHON) benchmarks/quickstarts.py $(ARGS)

clean:
	rm -rf .venv .venv-sglang .venv-megatron-next .venv-peers .venv-algorithm-peers *.egg-info .pytest_cache .ruff_cache .mypy_cache
