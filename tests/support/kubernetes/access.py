"""RBAC's decision, as the API server's authorizer takes it: rights add up, and nothing denies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.support.kubernetes.server import Answer, FakeServer

GROUP = "rbac.authorization.k8s.io"
_REVIEW = "/apis/authorization.k8s.io/v1/subjectaccessreviews"


class AuthorizingServer(FakeServer):
    """An API server that answers a SubjectAccessReview from `rbac`: roles and bindings."""

    def __init__(self, rbac: Sequence[dict]) -> None:
        super().__init__()
        self._rbac = rbac

    def answer_elsewhere(self, path: str, body: dict) -> Answer | None:
        if path != _REVIEW:
            return None
        status = {"allowed": is_allowed(self._rbac, body["spec"])}
        return Answer(201, body | {"status": status})


def is_allowed(rbac: Sequence[dict], review: dict) -> bool:
    """Return whether a rule allows the review's `spec`. Raises `KeyError` for a missing role."""
    asked = review["resourceAttributes"]
    return any(_covers(rule, asked) for rule in _rules(rbac, review, asked.get("namespace", "")))


def _rules(rbac: Sequence[dict], review: dict, namespace: str) -> Iterator[dict]:
    """Yield the rules that the bindings give to the user in a namespace, "" for the cluster."""
    roles = {(one["kind"], one["metadata"].get("namespace", ""), _name(one)): one for one in rbac}
    for binding in rbac:
        of_namespace = binding["metadata"].get("namespace", "")
        if binding["kind"] == "RoleBinding":
            if not namespace or of_namespace != namespace:
                continue
        elif binding["kind"] != "ClusterRoleBinding":
            continue
        if any(_is_user(subject, review, of_namespace) for subject in binding["subjects"]):
            reference = binding["roleRef"]
            place = of_namespace if reference["kind"] == "Role" else ""
            yield from roles[reference["kind"], place, reference["name"]]["rules"]


def _is_user(subject: dict, review: dict, namespace: str) -> bool:
    name = subject["name"]
    if subject["kind"] == "Group":
        return name in review.get("groups", [])
    if subject["kind"] == "ServiceAccount":
        name = f"system:serviceaccount:{subject.get('namespace', namespace)}:{name}"
    return name == review.get("user", "")


def _covers(rule: dict, asked: dict) -> bool:
    resource = asked["resource"]
    wanted = {resource}
    if subresource := asked.get("subresource", ""):
        wanted = {f"{resource}/{subresource}", f"*/{subresource}"}
    names = rule.get("resourceNames")
    return (
        _has(rule["verbs"], {asked["verb"]})
        and _has(rule.get("apiGroups", ()), {asked.get("group", "")})
        and _has(rule.get("resources", ()), wanted)
        and (not names or asked.get("name", "") in names)
    )


def _has(allowed: Sequence[str], wanted: set[str]) -> bool:
    return "*" in allowed or not wanted.isdisjoint(allowed)


def _name(one: dict) -> str:
    return str(one["metadata"]["name"])
