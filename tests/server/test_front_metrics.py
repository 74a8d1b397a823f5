"""The metrics of several replicas in one text: no two series are one, and the front's own are among them."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvarve.reference.server.front_metrics import front_families, merged
from kvarve.reference.server.replicas import Replica
from kvarve.reference.server.request_log import Responses
from kvarve.reference.server.serve_settings import Settings

TEXT = """\
# HELP kvarve_rejected_requests_total Requests that got an error, by status.
# TYPE kvarve_rejected_requests_total counter
kvarve_rejected_requests_total{status="400"} 2.0
# HELP vllm:num_requests_running Requests being computed.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m",engine="0"} 1.0
"""


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def test_each_replicas_series_has_its_number_and_the_front_counts_what_it_rejects(tmp_path: Path) -> None:
    replicas = [Replica(number, Settings(), tmp_path) for number in range(2)]
    replicas[1].up = True
    responses = Responses({("POST", "/{path:path}", 503): 4, ("GET", "/metrics", 200): 9})
    found = samples(merged([(0, TEXT), (1, TEXT)], front_families(replicas, responses)))
    rejected = "kvarve_rejected_requests_total"
    for number in "01":
        assert found[rejected, f"replica={number}", "status=400"] == 2.0
        engine = "vllm:num_requests_running", f"engine={number}", "model_name=m", f"replica={number}"
        assert found[engine] == 1.0
        assert found["kvarve_replica_up", f"replica={number}"] == float(number)
    assert found[rejected, "replica=front", "status=503"] == 4.0
    assert (rejected, "replica=front", "status=200") not in found
    assert found["kvarve_responses_total", "method=GET", "replica=front", "route=/metrics", "status=200"] == 9.0
