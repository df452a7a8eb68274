# Shoal: `make demo` and `make test` do all their own set-up; they need Python 3.11 (or newer) and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-all test-gpu test-versions soak lint types bench bench-overhead bench-api bench-pages bench-start bench-forming bench-reforming bench-scale bench-big-start bench-busy-host bench-data bench-streaming bench-determinism bench-snapshots bench-planner bench-fp8 bench-recovery bench-layouts bench-schedule bench-proofs bench-hugging-face bench-culprit bench-reports bench-long-job bench-programs bench-ends bench-gpu bench-fp8 gpu-checks fuzz-tasks fuzz-loops faults-map faults docs site picture screenshots researcher-tasks clean bench-media bench-system-metrics bench-damaged bench-twin bench-islands bench-compression

help:            ## what can be made
	@grep -hE '^[a-z0-9-]+: .*##' $(MAKEFILE_LIST) | awk -F ':.*## *' '{printf "  make %-18s %s\n", $$1, $$2}'

setup: $(VENV)/.ready   ## a virtual environment with everything in it

$(VENV)/.ready: pyproject.toml constraints.txt deploy/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh deploy/setup.sh
	@touch $@

demo: setup      ## train, kill a worker, continue, grow back, and compare with an undisturbed run
	@$(BIN)/shoal demo

test: setup      ## the core of everything: what is not marked `slow`, `matrix` or `soak`, and of the costly folders what tests/kit/cells.py names
	@$(BIN)/python tools/run_tests.py

test-slow: setup ## the tests marked `slow`, which CI runs too
	@$(BIN)/python tools/run_tests.py --beside 3 -m "slow and not (matrix or soak)"

test-all: setup  ## all tests and every cell of the matrices, without the soak
	@$(BIN)/pytest -m "not soak" --hypothesis-profile=explore

ON_GPU = tests/dist/group/test_re_forming.py tests/dist/group/test_failures.py tests/dist/group/test_every_phase.py tests/dist/state/test_replicas.py \
	tests/dist/state/test_transitions.py tests/dist/parallel/test_layouts.py tests/dist/step/test_parity.py tests/dist/step/test_techniques.py \
	tests/dist/deterministic tests/dist/process/test_profiling.py
test-gpu: setup  ## layouts, kills and re-formations with NCCL, all ranks on the first GPU; needs NCCL 2.30 (pip install -U nvidia-nccl-cu13)
	@SHOAL_TEST_DEVICE=cuda $(BIN)/pytest -m "not (matrix or soak)" $(ON_GPU)

VERSIONS ?=
test-versions: setup ## a sample of the tests with other versions of Python, torch and Ray, each in an environment of its own (7 GB with CUDA libraries, about 10 minutes each); VERSIONS="oldest newest" chooses
	@$(BIN)/python tools/test_versions.py $(VERSIONS)

MINUTES ?= 10
SEED    ?= 1
soak: setup      ## 10,000 drawn schedules of faults between supervisor and service; random faults for MINUTES=10 with SEED=1, then as long on hosts whose links are cut (needs root); parity, goodput and leaks after each
	@$(BIN)/python bench/soak/schedules.py --seed $(SEED)
	@$(BIN)/python bench/soak/main.py --minutes $(MINUTES) --seed $(SEED)
	@$(BIN)/python bench/soak/main.py --minutes $(MINUTES) --seed $(SEED) --hosts

N       ?= 500
fuzz-tasks: setup ## N=500 drawn tasks from SEED=1 on, each trained in five ways: equal to a plain loop, or refused in words
	@mkdir -p build && $(BIN)/python tools/fuzz_tasks.py --num $(N) --seed $(SEED) --out build/fuzz-tasks-$(SEED).jsonl

fuzz-loops: N = 200
fuzz-loops: setup ## N=200 drawn loops from SEED=1 on, each at one worker, at two, resumed, killed and resized: equal to plain torch, or refused in words
	@mkdir -p build && $(BIN)/python tools/fuzz_tasks.py --loops --num $(N) --seed $(SEED) --out build/fuzz-loops-$(SEED).jsonl

faults-map: setup ## which tests of `make test` reach which statement: as long as `make test` one after the other; continues
	@$(BIN)/python tools/inject_faults.py --map

faults: N = 40
faults: setup    ## N=40 small faults from SEED=1 over the product: which tests catch each; after make faults-map; continues
	@$(BIN)/python tools/inject_faults.py --num $(N) --seed $(SEED) --out build/faults.jsonl

lint: setup types ## ruff, mypy strict, import-linter, prettier
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@sh tools/set_pages.sh

types: setup     ## mypy, strict for what is shipped; both runs at once
	@$(BIN)/mypy --config-file bench/mypy.ini & $(BIN)/mypy; shipped=$$?; wait $$! && exit $$shipped

bench: bench-overhead bench-proofs bench-hugging-face bench-api bench-pages bench-start bench-forming bench-reforming bench-scale bench-big-start bench-busy-host bench-data bench-streaming bench-determinism bench-snapshots bench-planner bench-schedule bench-reports bench-long-job bench-programs bench-ends bench-gpu bench-fp8 bench-media bench-system-metrics bench-damaged bench-twin bench-islands bench-compression ## every benchmark; recovery and layouts in a short form
	@$(BIN)/python bench/recovery/main.py --systems shoal --events worker_kill --kills 1
	@$(BIN)/python bench/recovery/takeover.py --trials 1 --databases sqlite
	@$(BIN)/python bench/layouts/main.py --parts relayout,moving,planner

bench-system-metrics: setup ## what system metrics cost the training thread, a worker and the database
	@$(BIN)/python bench/system_metrics.py

bench-overhead: setup ## Shoal against the same training loop under plain torchrun
	@$(BIN)/python bench/overhead.py

bench-api: setup ## control plane: requests per second, lists, memory, scrapes, pages, 200 open streams, 200 jobs that report, 1,000 long polls, first step; uploads over a slow link (12 minutes)
	@$(BIN)/python bench/api/main.py
	@$(BIN)/python bench/api/slow_link.py

bench-pages: setup ## the workspace in Chromium: 200 jobs of 100,000 steps in 8 panels, first paint and interaction (2 minutes)
	@$(BIN)/python bench/workspace.py

bench-media: setup ## milliseconds for which logged images, histograms, tables and texts keep the training thread
	@$(BIN)/python bench/media.py

bench-long-job: setup ## a job of 26 million steps in SQLite: list, page, parts of the curve, scrape, size (ten minutes)
	@$(BIN)/python bench/api/long_job.py

bench-reports: setup ## what a report of a supervisor costs the service: CPU, and the time until it is stored
	@$(BIN)/python bench/api/supervisor_reports.py

bench-start: setup ## seconds until workers are ready, forked or as new interpreters; pauses of updates of the code
	@$(BIN)/python bench/start.py
	@$(BIN)/python bench/hot_update.py

bench-busy-host: setup ## false node deaths and suspicions while 20 busy processes compete with a job (3 minutes)
	@$(BIN)/python bench/busy_host.py

bench-scale: setup ## how the work of a supervisor grows with its workers, in one process and as Ray actors, on how many nodes they start, a pass of the control loop beside 20,000 queued jobs, kills of 4 to 48 real workers, and CPU time of polls
	@mkdir -p build && $(BIN)/python bench/scale/main.py --out build/scale.json
	@$(BIN)/python bench/scale/ray_actors.py --out build/ray-actors.json
	@$(BIN)/python bench/scale/orders.py
	@$(BIN)/python bench/scale/placement.py
	@$(BIN)/python bench/scale/passes.py
	@$(BIN)/python bench/scale/takeover.py
	@$(BIN)/python bench/scale/real_workers.py --out build/real-workers.json
	@$(BIN)/python bench/scale/polling.py --out build/polling.json

bench-big-start: setup ## memory of eight workers while models of 1 B and 0.5 B parameters start, first step included, and while one of 0.5 B is restored from disk; a node of eight with the defaults of a spec; host memory of snapshots and copies (30 minutes)
	@$(BIN)/python bench/scale/big_start.py
	@$(BIN)/python bench/scale/big_start.py --resume 500
	@$(BIN)/python bench/scale/default_memory.py
	@$(BIN)/python bench/scale/host_memory.py

bench-reforming: setup ## CPU seconds of 8, 16 and 32 workers while they form a group again, and of their small collectives around the ring and directly
	@$(BIN)/python bench/group/reforming.py
	@$(BIN)/python bench/group/direct_collectives.py

bench-forming: setup ## seconds to form a group of 4, 16 and 32 processes, with Shoal's store and with torch's TCPStore; CPU seconds of the store for an exchange of 64 to 1,024 ranks
	@$(BIN)/python bench/forming.py
	@$(BIN)/python bench/scale/gathering.py

bench-data: setup ## megabytes of text per second that one core tokenises, and samples per second of local shards beside a DataLoader
	@$(BIN)/python bench/data.py
	@OMP_NUM_THREADS=1 $(BIN)/python bench/data_peers.py

bench-damaged: setup ## files of every format, cut, swapped, empty, of another type and encoding: docs/measured/damaged-inputs.md (a minute)
	@OMP_NUM_THREADS=1 $(BIN)/python bench/damaged.py --out docs/measured/damaged-inputs.md

bench-streaming: setup ## shards that are streamed from a server which computes 500 TB: first batch, waits, memory, quality of the shuffle (5 minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python bench/shard_streaming/main.py

bench-determinism: setup ## what deterministic mode costs, by world size
	@$(BIN)/python bench/determinism.py

bench-snapshots: setup ## the snapshot store against memcpy
	@$(BIN)/python bench/snapshots.py

bench-planner: setup ## predictions beside 91 published runs, and seconds to rank the layouts of 1,024 and 16,384 GPUs
	@$(BIN)/python bench/published_runs.py
	@$(BIN)/python bench/planner.py

bench-fp8: setup ## losses in fp8 beside those of bf16 over 300 steps, and over a kill
	@$(BIN)/python bench/fp8.py

bench-recovery: setup ## what failures cost: Shoal, Ray Train V2, torchrun and torchft side by side (two hours; continues)
	@$(BIN)/python -c "import torchft" 2>/dev/null || $(BIN)/pip install -q -c constraints.txt "torchft>=0.2,<0.3" || true
	@mkdir -p build && $(BIN)/python bench/recovery/main.py --out build/recovery.jsonl

bench-layouts: setup ## what a change of layout costs, and the planner against this machine (ten minutes)
	@mkdir -p build && $(BIN)/python bench/layouts/main.py --out build/layouts.json

bench-proofs: setup ## the table of plans proven and refused: built-in models, a user's plan, and wrong ones (three minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python bench/proofs.py

bench-hugging-face: setup ## families of transformers on each axis: losses, gradients and exports beside one process; padding of micro-batches (three minutes)
	@OMP_NUM_THREADS=1 $(BIN)/python bench/hugging_face.py
	@OMP_NUM_THREADS=1 $(BIN)/python bench/padding.py

bench-twin: setup ## one job under failures at 16,384 and 100,000 GPUs, in virtual time, against published runs and policies that restart (a quarter of an hour)
	@mkdir -p build && $(BIN)/python bench/twin.py --out build/twin.md --picture build/twin.svg

bench-schedule: setup ## scheduling policies on job traces, the time of a decision, and six real jobs for MINUTES=10
	@mkdir -p build && $(BIN)/python bench/schedule/main.py --out build/schedule.md
	@$(BIN)/python bench/market/six_jobs.py --minutes $(MINUTES) --out build/six-jobs.json
	@$(BIN)/python bench/market/urgent_start.py --out build/urgent.json

bench-culprit: setup ## 64 faults of eight kinds and 20 controls in a real job: is the right rank suspected, how soon, and nobody without a fault (30 minutes; root)
	@mkdir -p build && $(BIN)/python bench/culprit/main.py --out build/culprit.md

bench-programs: setup ## a script, a loop and a script of Ray Train under Shoal, beside torchrun and Ray Train: start, step, kills; from an empty directory to the first step (20 minutes)
	@$(BIN)/python bench/programs/main.py
	@$(BIN)/python bench/programs/first_step.py
	@$(BIN)/python bench/programs/beside.py
	@for size in "16 40 48" "128 20 384" "320 14 960" "768 10 2304"; do OMP_NUM_THREADS=1 SHOAL_CHECKPOINT_DIR=$$(mktemp -d) $(BIN)/torchrun --standalone --nproc-per-node 3 bench/programs/paired.py $$size; done

bench-islands: setup ## what rounds cost two islands behind links of 10 Mbit/s and 100 ms, with each compression, beside an all-reduce in each step; writes docs/measured/islands.md (20 minutes)
	@$(BIN)/python bench/islands.py --out docs/measured/islands.md

bench-compression: setup ## gradients as fp32, bf16 and int8: bytes a step, seconds over a slow link, losses over 300 steps and over a kill; writes docs/measured/compression.md (8 minutes; root)
	@OMP_NUM_THREADS=1 $(BIN)/python bench/compression.py --out docs/measured/compression.md

bench-ends: setup ## what a user reads of twelve ends of a script, a loop and a task: docs/measured/ends.md (10 minutes)
	@$(BIN)/python bench/program_ends.py --out docs/measured/ends.md

bench-gpu: setup ## one GPU: MFU, the engine against a plain loop, and the cost of a snapshot; without a GPU it only says so
	@$(BIN)/python bench/gpu.py
	@$(BIN)/python bench/gpu_snapshots.py

gpu-checks: setup ## everything to be run where a GPU can be had: versions, waits of the host, speed, snapshots, tests (10 minutes)
	@$(BIN)/python bench/gpu_checks.py info cell waits speed snapshot tests

docs: setup      ## regenerate the generated pages
	@$(BIN)/python tools/golden.py
	@$(BIN)/python tools/docs_pages.py
	@$(BIN)/python tools/programs_page.py
	@$(BIN)/python tools/runbook_page.py
	@$(BIN)/python tools/cli_page.py
	@$(BIN)/python tools/trace_generator.py
	@$(BIN)/python tools/simulation_page.py
	@$(BIN)/python tools/openapi.py
	@$(BIN)/python tools/control_plane_requirements.py
	@$(BIN)/python tools/dashboards.py
	@$(BIN)/python tools/kubernetes_manifests.py

site: setup      ## the documentation as a site with search: build/site/index.html, also without a network
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet && echo "built: build/site/index.html"

picture: setup   ## the README's picture, from a real run of the demo
	@COLUMNS=104 $(BIN)/shoal demo | tee build-demo.txt && $(BIN)/python tools/picture.py build-demo.txt docs/images/demo.svg
	@rm -f build-demo.txt

screenshots: setup ## the pictures of the docs, and in build/screenshots every page at four widths in light and dark, from a real run; needs chromium and chromium-driver
	@$(BIN)/python tools/screenshots.py

researcher-tasks: setup ## what a researcher does with the pages, task by task in Chromium: writes clicks, texts and keys into docs/researcher-tasks.md (3 minutes)
	@$(BIN)/python tools/researcher_tasks.py

clean:           ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis build dist
