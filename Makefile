# Everything below sets up what it needs: an environment by uv in .venv, Prometheus by apt-get where that is allowed.
.POSIX:
.NOTPARALLEL:
.SUFFIXES:

ARGS =
PYTEST_ARGS =
PYTHON = .venv/bin/python
SETUP = @sh .ci/setup.sh

help: ## this list
	@sed -n 's/^\([a-z0-9.-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 24

demo: ## train on this machine and watch it through Prometheus; options: ARGS="--ranks 4 --steps 300", ARGS=--help
	$(SETUP) demo prometheus
	@$(PYTHON) -m mindspore_exporter.cli demo $(ARGS)

test: ## every check, and a table of their times
	$(SETUP) prometheus! test smoke
	@MAKE="$(MAKE)" sh .ci/suites.sh lint types unit integration test-2.10

lint: ## ruff: faults and format
	$(SETUP) test
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .

types: ## mypy --strict
	$(SETUP) test
	@$(PYTHON) -m mypy

unit: ## unit tests, without MindSpore; PYTEST_ARGS="-k name"
	$(SETUP) test
	@$(PYTHON) -m pytest tests/unit $(PYTEST_ARGS)

integration: ## tests on real trainings and a real Prometheus
	$(SETUP) prometheus! test
	@$(PYTHON) -m pytest tests/integration --durations=10 $(PYTEST_ARGS)

test-2.10: ## capture and the demo on MindSpore 2.10.0
	$(SETUP) prometheus! smoke
	@.venv-210/bin/python -m pytest -m 'not mindformers' $(PYTEST_ARGS) tests/integration/test_capture.py \
		tests/integration/test_learning_rate.py \
		tests/integration/test_demo_run.py::test_what_prometheus_stored_is_what_the_run_logged

bench: ## what the callback costs, against other monitors; writes the table
	$(SETUP) test
	@$(PYTHON) tests/benchmarks/run.py $(ARGS)

clean: ## remove environments, caches and what was built
	rm -rf .venv .venv-210 .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build .demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help demo test lint types unit integration test-2.10 bench clean
