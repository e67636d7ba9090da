"""The operator may do what its code does, and nothing else."""

from collections.abc import Iterable
from typing import Any

import pytest

from kubelora_operator.kube.rbac import LEASE, NODES, WORK, Permission
from tests.chart.rendering import (
    BARE,
    FULLNAME,
    MATRIX,
    NAMESPACE,
    NAMESPACED,
    Helm,
    Object,
    of_kind,
    one,
)

Grant = tuple[str, str, str]


def granted(role: Object) -> set[Grant]:
    """(group, resource, verb) of each thing that a role allows."""
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def needed(permissions: Iterable[Permission]) -> set[Grant]:
    return {(p.group, p.resource, verb) for p in permissions for verb in p.verbs}


def test_cluster_wide_rights_are_what_the_code_lists(helm: Helm) -> None:
    objects = helm.render({})

    assert granted(one(objects, "ClusterRole")) == needed((*WORK, *NODES))
    assert one(objects, "ClusterRoleBinding")["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": FULLNAME,
    }


def test_leases_are_a_matter_of_the_release_namespace(helm: Helm) -> None:
    objects = helm.render({})
    role = one(objects, "Role", f"{FULLNAME}-leader")

    assert granted(role) == needed(LEASE)
    assert role["metadata"]["namespace"] == NAMESPACE
    assert "leases" not in {resource for _, resource, _ in granted(one(objects, "ClusterRole"))}
    # Only a creation can't be narrowed to a name.
    assert {tuple(r["verbs"]) for r in role["rules"] if "resourceNames" not in r} == {("create",)}
    assert one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["env"].count(
        {"name": "KUBELORA_LEASE_NAME", "value": role["rules"][1]["resourceNames"][0]}
    )


def test_named_namespaces_get_a_role_each_and_the_cluster_none(helm: Helm) -> None:
    objects = helm.render(NAMESPACED)
    roles = [r for r in of_kind(objects, "Role") if r["metadata"]["name"] == FULLNAME]

    assert {r["metadata"]["namespace"] for r in roles} == {"lab", "studio"}
    assert all(granted(r) == needed(WORK) for r in roles)
    assert of_kind(objects, "ClusterRoleBinding") == []
    assert {r["metadata"]["name"] for r in of_kind(objects, "ClusterRole")} == {
        f"{FULLNAME}-view",
        f"{FULLNAME}-edit",
    }


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_nothing_is_granted_by_wildcard_and_nobody_reads_secrets(
    helm: Helm, values: dict[str, Any]
) -> None:
    for role in (o for o in helm.render(values) if o["kind"] in ("Role", "ClusterRole")):
        grants = granted(role)
        assert all("*" not in part for grant in grants for part in grant)
        resources = {resource.split("/")[0] for _, resource, _ in grants}
        assert not resources & {"secrets", "serviceaccounts", "roles", "clusterroles"}
        assert {verb for _, resource, verb in grants if resource.startswith("nodes")} <= {"get"}
        assert not any(verb in ("escalate", "bind", "impersonate") for _, _, verb in grants)
        assert ("", "pods", "create") not in grants
        assert not any(resource in ("pods/exec", "pods/attach") for _, resource, _ in grants)


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX)
def test_every_binding_names_a_role_of_the_chart_and_the_operators_account(
    helm: Helm, values: dict[str, Any]
) -> None:
    objects = helm.render(values)
    account = one(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"]
    roles = {(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects}

    for binding in (o for o in objects if o["kind"].endswith("RoleBinding")):
        reference = binding["roleRef"]
        assert (
            reference["kind"],
            binding["metadata"].get("namespace"),
            reference["name"],
        ) in roles
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}
        ]


def test_people_who_edit_a_namespace_edit_its_jobs_and_never_write_status(helm: Helm) -> None:
    objects = helm.render({})
    view = one(objects, "ClusterRole", f"{FULLNAME}-view")
    edit = one(objects, "ClusterRole", f"{FULLNAME}-edit")
    aggregate = "rbac.authorization.k8s.io/aggregate-to-"

    assert {k for k in view["metadata"]["labels"] if k.startswith(aggregate)} == {
        f"{aggregate}view",
        f"{aggregate}edit",
        f"{aggregate}admin",
    }
    assert {k for k in edit["metadata"]["labels"] if k.startswith(aggregate)} == {
        f"{aggregate}edit",
        f"{aggregate}admin",
    }
    assert {verb for _, _, verb in granted(view)} == {"get", "list", "watch"}
    assert {resource for _, resource, _ in granted(edit)} == {"loratrainingjobs"}


def test_rights_and_account_can_be_left_to_someone_else(helm: Helm) -> None:
    objects = helm.render(BARE)

    assert {o["kind"] for o in objects} == {"Deployment"}
    pod = one(objects, "Deployment")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "given"
