# Everything a fresh machine needs: `make demo` and `make test` set up their own virtual environment.
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name) 2>/dev/null)))
BIN := .venv/bin
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: demo test check lint types docs dist bench mutations trust audit clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

.venv/installed-docs: .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

demo: .venv/installed  ## FedAvg forgets, ReSCENE does not; the last line says where the report lies
	$(BIN)/rescene demo

test: .venv/installed-dev  ## the whole suite, two workers with one thread each
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 -m "not slow" --doctest-modules src/rescene tests

check: .venv/installed-dev lint types  ## everything: format, lint, types, slow tests
	$(ONE_THREAD) $(BIN)/python -m pytest -n 2 --doctest-modules src/rescene tests

lint: .venv/installed-dev
	$(BIN)/ruff format --check src tests benchmarks docs examples
	$(BIN)/ruff check src tests benchmarks docs examples

types: .venv/installed-dev
	$(BIN)/mypy

docs: .venv/installed-docs  ## the site, at docs/_build/html/index.html; the build fetches nothing and takes no warning
	$(BIN)/python -m sphinx -W -q -b html docs docs/_build/html

dist: .venv/installed-dev  ## wheel and sdist in dist/; the wheel is installed with its dependencies into a new environment and runs there
	rm -rf dist build/clean
	$(BIN)/python -m hatchling build
	$(PYTHON) -m venv build/clean
	build/clean/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build && clean/bin/rescene run smoke tasks.limit=1 federation.num_rounds=1 --out clean/run

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
	rm -rf .venv build dist runs docs/_build docs/generated
