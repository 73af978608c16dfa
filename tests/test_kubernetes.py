"""The manifests in docs/kubernetes against Kubernetes' schemas, the pserver's options and the settings."""

from __future__ import annotations

import re
from inspect import signature
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml  # type: ignore[import-untyped]

from fleet_sparse.models.options import parse
from fleet_sparse.net_addresses import Address
from fleet_sparse.pserver.command_line import run
from support.sources import ROOT

FOLDER = ROOT / "docs" / "kubernetes"
VERSION = "1.28"
"""The oldest version of Kubernetes that docs/deployment.md promises."""


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


def pod_templates() -> dict[str, Any]:
    templates = {}
    (paddle_job,) = documents("paddlejob.yaml")
    for role in ("ps", "worker"):
        templates[f"paddlejob {role}"] = paddle_job["spec"][role]["template"]
    for document in documents("statefulset.yaml"):
        if "template" in document["spec"]:
            templates[f"statefulset {document['kind']}"] = document["spec"]["template"]
    return templates


TEMPLATES = pod_templates()
CONTAINERS = {name: template["spec"]["containers"][0] for name, template in TEMPLATES.items()}


def variables(container: Any) -> dict[str, Any]:
    return {variable["name"]: variable.get("value") for variable in container["env"]}


@pytest.mark.parametrize("document", documents("statefulset.yaml"), ids=lambda document: document["kind"])
def test_a_manifest_is_valid(document: Any) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_pod_template_is_valid(name: str) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **TEMPLATES[name]}
    kubernetes_validate.validate(pod, VERSION, strict=True)


def test_the_paddle_job_has_the_operators_fields() -> None:
    (job,) = documents("paddlejob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("batch.paddlepaddle.org/v1", "PaddleJob")
    assert job["spec"].keys() == {"intranet", "cleanPodPolicy", "ps", "worker"}
    assert job["spec"]["ps"].keys() == job["spec"]["worker"].keys() == {"replicas", "template"}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_setting_exists(name: str) -> None:
    running = (ROOT / "docs" / "running.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^\| `(FLEET_SPARSE_\w+)`", running, re.M))
    named = {name for name in variables(CONTAINERS[name]) if name.startswith("FLEET_SPARSE_")}
    assert named
    assert named <= known


@pytest.mark.parametrize("name", [name for name in CONTAINERS if name != "statefulset StatefulSet"])
def test_the_training_command_has_known_options(name: str) -> None:
    python, m, module, *arguments = CONTAINERS[name]["command"]
    assert (python, m, module) == ("python", "-m", "fleet_sparse.models.train")
    assert parse(arguments).save == "model"


def test_the_pservers_of_the_stateful_set_and_the_workers_agree() -> None:
    service, pservers, job = documents("statefulset.yaml")
    command = CONTAINERS["statefulset StatefulSet"]["command"]
    options = dict(option.removeprefix("--").split("=", 1) for option in command[3:] if "=" in option)
    num_pservers, num_workers = pservers["spec"]["replicas"], job["spec"]["completions"]
    servers = [Address.parse(server) for server in options["servers"].split(",")]
    port = service["spec"]["ports"][0]["port"]
    name = f"{pservers['metadata']['name']}-{{}}.{service['metadata']['name']}"
    assert servers == [Address(name.format(index), port) for index in range(num_pservers)]
    assert int(options["num-shards"]) == num_pservers
    assert options["control"] == f"$(POD_NAME).{service['metadata']['name']}:{port}"
    of_worker = variables(CONTAINERS["statefulset Job"])
    assert of_worker["PADDLE_PSERVERS_IP_PORT_LIST"] == options["servers"]
    assert int(of_worker["PADDLE_TRAINERS_NUM"]) == num_workers
    assert len(of_worker["PADDLE_TRAINER_ENDPOINTS"].split(",")) == num_workers


def test_the_pserver_command_has_known_options() -> None:
    options = [option.split("=")[0] for option in CONTAINERS["statefulset StatefulSet"]["command"][3:]]
    known = {f"--{name.replace('_', '-')}" for name in signature(run).parameters}
    assert set(options) <= known


@pytest.mark.parametrize("manifest", ["paddlejob", "statefulset"])
def test_all_processes_of_a_job_have_its_id(manifest: str) -> None:
    containers = [container for name, container in CONTAINERS.items() if name.startswith(manifest)]
    assert len(containers) == 2
    assert {variables(container)["FLEET_SPARSE_JOB_ID"] for container in containers} == {"click-model-1"}


def test_pservers_of_the_stateful_set_keep_their_logs() -> None:
    _, pservers, _ = documents("statefulset.yaml")
    container = CONTAINERS["statefulset StatefulSet"]
    settings, mounts = variables(container), {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    claims = [claim["metadata"]["name"] for claim in pservers["spec"]["volumeClaimTemplates"]]
    assert "--supervised" in container["command"]
    assert settings["FLEET_SPARSE_DURABILITY"] == "log"
    assert mounts[settings["FLEET_SPARSE_LOG"]] in claims
