"""URLs of pages on the admin site that received the request.

A project may have several admin sites.
"""

from __future__ import annotations

from django.http import HttpRequest, HttpResponseRedirect
from django.urls import reverse

#: A message's page, by its id. Its address can be pasted into a ticket.
MESSAGE = "admin:django_txmsg_message"


def address(request: HttpRequest, page: str, *args: object) -> str:
    """Return the URL of a page on the admin site that received the request."""
    here = request.resolver_match.namespace if request.resolver_match else None
    return reverse(page, args=args, current_app=here)


def led(request: HttpRequest, page: str, *args: object) -> HttpResponseRedirect:
    """Return a redirect to a page on the admin site that received the request."""
    return HttpResponseRedirect(address(request, page, *args))
