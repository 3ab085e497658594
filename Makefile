# Everything a fresh machine needs: `make demo` and `make test` set up their own virtual environment.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name) 2>/dev/null)))
BIN := .venv/bin
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: demo test check lint types bench mutations trust audit clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: .venv/installed  ## FedAvg forgets, ReSCENE does not; the last line says where the report lies
	$(BIN)/rescene demo

test: .venv/installed-dev  ## the whole suite, two workers with one thread each
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 -m "not slow" --doctest-modules src/rescene tests

check: .venv/installed-dev lint types  ## everything: format, lint, types, slow tests
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --doctest-modules src/rescene tests

lint: .venv/installed-dev
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks

types: .venv/installed-dev
	$(BIN)/mypy

bench: .venv/installed  ## ratios measured in one run on this machine, written to results/bench/
	$(BIN)/python benchmarks/bench.py

mutations: .venv/installed-dev  ## seeded bugs, each of which a test must catch
	$(BIN)/python tests/mutations.py

trust: .venv/installed-dev  ## what is promised about crashes and disks, checked: one table; `make trust FULL=--full` for a night
	$(ONE_THREAD) $(BIN)/python benchmarks/trust.py $(FULL)

audit: .venv/installed-dev  ## known vulnerabilities of what requirements.lock names; needs a network
	$(BIN)/pip install --quiet --disable-pip-version-check pip-audit
	@$(BIN)/pip-audit --strict --disable-pip --require-hashes -r requirements.lock || { echo "FAILED: the lines above name a vulnerability, or say that it could not be looked up (offline nothing is audited)"; exit 1; }

clean:
	rm -rf .venv build dist runs
