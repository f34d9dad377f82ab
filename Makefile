# Every task of this repository. `make` alone lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)

VENV_OLDEST := .venv-oldest
VENV_AIRFLOW := .venv-airflow

# Processes of tests. Most tests wait for a server, a daemon or Spark; with more, Spark misses its 10 s for a worker.
PROCESSES ?= 3

# Without bytecode, each process that a test starts compiles all that it imports: twice the time for one with Dagster.
unexport PYTHONDONTWRITEBYTECODE

# The directory with the programs of the PostgreSQL that the tests run on.
PG ?=
ifneq ($(PG),)
export EVENTSQL_POSTGRES := $(abspath $(PG))
endif

.PHONY: help setup demo demo-airflow airflow browser jdbc pgbouncer tls promtool java test nightly rows pooler pooled oldest bench faults shardfaults lint format types contracts docs check clean

help: ## List the tasks
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

setup: $(VENV)/.installed ## Install everything from the lock file into .venv

$(VENV)/.installed: pyproject.toml uv.lock | uv
	UV_PROJECT_ENVIRONMENT=$(VENV) $(UV) sync --frozen --all-extras --no-extra airflow --python "$$(command -v $(PYTHON))"
	@touch $@

.PHONY: uv
uv:
	@if [ "$(UV)" = .uv/bin/uv ] && [ ! -x .uv/bin/uv ]; then \
		$(PYTHON) -m venv .uv || { echo "$(PYTHON) cannot make a virtual environment: install its venv module" \
			"(Debian, Ubuntu: apt-get install python3-venv), or uv."; exit 1; }; \
		.uv/bin/pip install --quiet uv; \
	fi

demo: setup ## Run the whole system here: database, Dagster, a ride simulation (ONCE=1: one round, then end)
	@# Ctrl-C is how a demo ends that has no end of its own: make reports no error then.
	$(BIN)/eventsql dev $(if $(ONCE),--once,|| [ $$? = 130 ])

browser: ## Install Chromium for the tests of what a person sees, where apt-get can
	@if ! command -v chromium chromium-browser google-chrome >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver; \
		else \
			echo "No Chromium here: the browser tests will say that they did not run. Install chromium and chromium-driver."; \
		fi; \
	fi

jdbc: ## Install PostgreSQL's JDBC driver, with which `eventsql bench spark` compares, where apt-get can
	@if [ ! -e /usr/share/java/postgresql.jar ]; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libpostgresql-jdbc-java; \
		else \
			echo "No JDBC driver here: the test of the comparison will say that it did not run."; \
		fi; \
	fi

pgbouncer: ## Install PgBouncer for the tests through a pooler, where apt-get can
	@if ! PATH="$$PATH:/usr/sbin" command -v pgbouncer >/dev/null; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends pgbouncer; \
		else \
			echo "No PgBouncer here: the tests through a pooler will say that they did not run. Install pgbouncer."; \
		fi; \
	fi

tls: ## Install a PostgreSQL that is built with TLS, for the tests with a server that demands it, where apt-get can
	@if ! ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1; then \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql; \
		else \
			echo "No PostgreSQL with TLS here: the tests with it will say that they did not run. Install postgresql."; \
		fi; \
	fi

promtool: ## Fetch Prometheus and promtool for the tests of dashboard and alerts, where apt-get can: the programs alone, without a service
	@if ! PATH="$$PATH:$(CURDIR)/.promtool/usr/bin" command -v prometheus >/dev/null; then \
		if command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null; then \
			{ [ "$$(id -u)" != 0 ] || apt-get update -qq; } && mkdir -p .promtool && cd .promtool && apt-get download -qq prometheus && \
				dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x ./usr/bin/promtool ./usr/bin/prometheus && rm -f prometheus_*.deb; \
		fi; \
		PATH="$$PATH:$(CURDIR)/.promtool/usr/bin" command -v prometheus >/dev/null || \
			echo "No Prometheus here: the tests of dashboard and alerts will say that they did not run. Install prometheus."; \
	fi

java: ## Fetch EventSQL's Java library for the tests that share a database with it, where Maven and its repository have it
	@if ! command -v mvn >/dev/null; then \
		echo "No Maven here: the tests with EventSQL's Java library will say that they did not run."; \
	elif ! mvn --quiet --batch-mode --update-snapshots --file tests/java/pom.xml dependency:copy-dependencies \
		-DoutputDirectory="$(CURDIR)/.java" >/dev/null; then \
		echo "EventSQL's Java library could not be fetched: the tests with it will say that they did not run."; \
	fi

test: setup browser jdbc pgbouncer tls promtool java ## Run the tests but the nightly ones and those of Airflow (ARGS=tests/…: some; PG=/usr/lib/postgresql/15/bin: on that PostgreSQL, from 14 on)
	$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

nightly: setup $(VENV_AIRFLOW)/.installed browser jdbc pgbouncer tls promtool java ## Run every test, the exhaustive ones too (ARGS=tests/…: some)
	@# An exhaustive test may take longer than the ordinary limit, and the report of all threads can end its process (Python 3.11).
	EVENTSQL_FUZZ_EXAMPLES=20 $(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder \
		--override-ini faulthandler_timeout=1830 -m "nightly or not nightly" $(ARGS)
	$(if $(ARGS),,$(VENV_AIRFLOW)/bin/python -m pytest -m "nightly or not nightly" tests/airflow)

rows: setup ## Run the tests with every topic in rows instead of blocks (ARGS=tests/…: some)
	$(BIN)/python -m pytest --storage rows --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder $(or $(ARGS), \
		$(addprefix tests/,log publishing consuming topics maintenance queue views capture store shards spark dagster storage database \
			metrics roles client languages assets cli))

THROUGH := $(BIN)/python -m pytest --through-pooler --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

pooler: setup pgbouncer ## Run the tests of the log and its rooms through PgBouncer, in transaction mode (ARGS=tests/…: some)
	$(THROUGH) $(or $(ARGS),tests/log tests/topics tests/publishing tests/consuming tests/maintenance tests/queue tests/store tests/views $(wildcard tests/cli/test_[eprs]*.py) \
		$(addprefix tests/cli/test_,dead_letters.py doctor.py looking.py migrate.py transfer.py) \
		tests/spark/test_write.py::test_a_topic_is_copied_by_reading_and_writing_it)

pooled: setup pgbouncer
	@if PATH="$$PATH:/usr/sbin" command -v pgbouncer >/dev/null; then $(THROUGH) --quiet \
		tests/consuming/test_claims.py tests/consuming/test_leases.py tests/publishing/test_publisher.py tests/topics/test_offsets.py \
		tests/queue/test_queue.py tests/store/test_repository.py; fi

oldest: | uv ## Run Dagster's tests with the oldest versions that pyproject.toml allows (ARGS=tests: all tests)
	@test -x $(VENV_OLDEST)/bin/python || $(UV) venv --quiet --python "$$(command -v $(PYTHON))" $(VENV_OLDEST)
	@# What the file already says of packages that pyproject.toml does not name stays as it is.
	$(UV) pip compile --quiet --python $(VENV_OLDEST)/bin/python --resolution lowest-direct --extra all --group dev \
		--no-header --no-annotate pyproject.toml --output-file .ci/oldest.txt
	$(UV) pip sync --quiet --python $(VENV_OLDEST)/bin/python .ci/oldest.txt
	$(UV) pip install --quiet --python $(VENV_OLDEST)/bin/python --no-deps --editable .
	$(VENV_OLDEST)/bin/python -m pytest $(or $(ARGS),tests/dagster)

# Airflow's parts have an environment of their own from the same lock file: Airflow pins more than this package does.
$(VENV_AIRFLOW)/.installed: pyproject.toml uv.lock | uv
	UV_PROJECT_ENVIRONMENT=$(VENV_AIRFLOW) $(UV) sync --frozen --extra airflow --extra local --extra spark \
		--no-default-groups --group airflow --python "$$(command -v $(PYTHON))"
	@touch $@

demo-airflow: $(VENV_AIRFLOW)/.installed ## Run the whole system here with Airflow: one round of its DAGs, then end (SERVE=1: until Ctrl-C)
	$(VENV_AIRFLOW)/bin/eventsql --home .eventsql/airflow dev --dags deploy/airflow/dags $(if $(SERVE),|| [ $$? = 130 ],--once)

airflow: $(VENV_AIRFLOW)/.installed ## Check the types of what needs Airflow, and run its tests (ARGS=tests/airflow/…: some)
	$(VENV_AIRFLOW)/bin/mypy --config-file .ci/mypy-airflow.ini
	$(VENV_AIRFLOW)/bin/python -m pytest $(or $(ARGS),tests/airflow)

bench: setup ## Measure the figures of docs/benchmarks.md that need a database alone (ARGS=--quick: a small run)
	$(BIN)/eventsql bench all $(ARGS)

kafka: setup ## Measure Kafka beside the package on this machine, where Maven is (ARGS=--events N --batch N --rounds N)
	$(BIN)/python benchmarks/kafka/run.py $(ARGS)

faults: setup ## Kill processes and the server under load, then look for lost and repeated events (ARGS=--events N --seed N)
	$(BIN)/python -m tests.log.faults $(ARGS)

shardfaults: setup ## Run the faults over two servers with a shard each, while further shards are added (ARGS=--events N --seed N)
	$(BIN)/python -m tests.log.faults --shards 2 $(ARGS)

lint: setup ## Look for mistakes and unformatted code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup ## Check the types
	$(BIN)/mypy

contracts: setup ## Check that no floor imports a higher one, and that there is no circle of imports
	$(BIN)/lint-imports

docs: setup ## Build the documentation as a site: build/site/index.html
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -b html docs build/site

check: ## Everything that CI runs
	@# Each of the first five has one process.
	$(MAKE) --jobs 2 lint types contracts docs airflow
	$(MAKE) test pooled

clean: ## Remove what tests and tools left behind (the demo's data in .eventsql stays)
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis dist build spark-warehouse
