"""`FlowView` returns a run as JSON, for a web page that waits for the run."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any, cast

from django.db import connections, models, transaction
from django.http import HttpRequest, JsonResponse
from django.http.response import HttpResponseBase
from django.views import View

from .. import conf
from ..models import Run
from .asking import awaited, ended
from .flow import Flow

#: The longest `?wait=`, in seconds.
MAX_WAIT = 30.0


class FlowView(View):
    """Answers GET with the JSON of a run: `run_id`, `key`, `step`, `waits_for`,
    `outcome` ("" while the run is open) and `answer`. `?wait=20` waits up to 20 seconds
    for the end of the run. The longest wait is 30 seconds.

    Add the view to your URLs: `path("orders/<uuid:run_id>/",
    FlowView.as_view(flow=Checkout))`. Anyone who has the URL can read the answer. So
    add a mixin such as LoginRequiredMixin, and limit `runs()` to the runs of
    `self.request.user`.
    """

    flow: type[Flow[Any, Any]] | None = None

    @classmethod
    def as_view(cls, **options: Any) -> Callable[..., HttpResponseBase]:
        """Return the view function. Neither ATOMIC_REQUESTS nor OutboxMiddleware opens
        a transaction for this view, so no transaction is open while the view waits."""
        # Not on dispatch(), which a mixin may replace.
        view: Any = super().as_view(**options)
        for using in connections:
            view = transaction.non_atomic_requests(using)(view)
        return cast("Callable[..., HttpResponseBase]", view)

    def runs(self) -> models.QuerySet[Run]:
        """Return the runs that the view may show, by default all runs of the flow."""
        assert self.flow is not None, "Write FlowView.as_view(flow=…)."
        declared = self.flow._declaration
        runs: models.QuerySet[Run] = Run.objects.using(declared.using).filter(
            flow=declared.name, service=conf.get().SERVICE
        )
        return runs

    def get(self, request: HttpRequest, run_id: uuid.UUID) -> JsonResponse:
        """Return the run as JSON. The status is 404 if the run does not exist, and 400
        if `wait` is not a number."""
        try:
            wait = min(float(request.GET.get("wait", 0)), MAX_WAIT)
        except ValueError:
            return JsonResponse({"error": "wait= is not a number."}, status=400)
        run = self.runs().filter(run_id=run_id).first()
        if run is None:
            return JsonResponse({"error": "There is no such run."}, status=404)
        done = ended(run) or awaited(run, wait)
        run.refresh_from_db(using=run._state.db)  # not a router's replica
        found = run if done is None else done
        return JsonResponse(
            {
                "run_id": str(run.run_id),
                "key": run.key,
                "step": found.step,
                "waits_for": found.waits_for,
                "outcome": "" if done is None else done.outcome,
                "answer": None if done is None else json.loads(done.answer),
            }
        )
