"""A file on a web server; only the parts that are read are downloaded."""

import io
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from typing import TypeVar

Answer = TypeVar("Answer")

TIMEOUT = 30  # seconds without a byte
PAUSES = (0, 1, 5, 30)  # seconds before the connection is opened again


class RemoteFile(io.RawIOBase):
    """Reads a file over HTTP; a seek asks the server for the rest from there.

    Wrap it in `io.BufferedReader`. A connection that breaks is opened again where it broke.
    """

    def __init__(self, url: str):
        """Ask the server for the file; an OSError is raised if there is none.

        The request is a GET, since an address may be signed for GET alone.
        """
        super().__init__()
        self.url = url
        self._position = 0
        self._state: str | None = None  # tells whether the file was changed while it was read
        self._response: HTTPResponse | None = None
        # At the start only a busy server is asked again: no connection means a mistyped name.
        self._response = self._ask_again(self._connect, urllib.error.HTTPError)
        headers = self._response.headers
        self.size = int(headers.get("Content-Length", -1))
        # Changes when the file does; always new if the server sends neither header.
        marks = [headers.get("ETag"), headers.get("Last-Modified")]
        self.version = f"{marks if any(marks) else uuid.uuid4()} {self.size}"

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True where the server states the size."""
        return self.size >= 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position without reading."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if base + offset != self._position:
            self._disconnect()
        self._position = base + offset
        return self._position

    def readinto(self, buffer) -> int:
        """Read at most as many bytes as the buffer holds; 0 at the end."""
        if self._position == self.size:
            return 0
        return self._ask_again(partial(self._read, buffer), OSError, HTTPException)

    def close(self) -> None:
        """Drop the connection."""
        self._disconnect()
        super().close()

    def _ask_again(self, ask_fn: Callable[[], Answer], *errors: type[Exception]) -> Answer:
        """Return the answer of `ask_fn`; after a pause ask again if one of `errors` may pass."""
        pauses = list(PAUSES)
        while True:
            try:
                return ask_fn()
            except errors as error:
                self._disconnect()
                # Failures of the connection may pass, and those of a busy server.
                stays = False
                if isinstance(error, urllib.error.HTTPError):
                    error.close()
                    stays = error.code != HTTPStatus.TOO_MANY_REQUESTS and error.code < 500
                if stays or not pauses:
                    raise
                time.sleep(pauses.pop(0))

    def _read(self, buffer) -> int:
        if self._response is None:
            self._response = self._connect()
        count = self._response.readinto(buffer)
        if count == 0 < self.size - self._position:
            raise ConnectionError(f"the connection ended at byte {self._position}")
        self._position += count
        return count

    def _connect(self) -> HTTPResponse:
        headers = {"Range": f"bytes={self._position}-"} if self._position else {}
        request = urllib.request.Request(self.url, headers=headers)
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
        state = response.headers.get("Last-Modified") or response.headers.get("ETag")
        problem = None
        if self._position and response.status != HTTPStatus.PARTIAL_CONTENT:
            problem = "the server sends no parts of files"
        elif None not in (state, self._state) and state != self._state:
            problem = "the file was changed while it was read"
        if problem is not None:
            raise urllib.error.HTTPError(
                self.url, response.status, problem, response.headers, response
            )
        self._state = state or self._state
        return response

    def _disconnect(self) -> None:
        if self._response is not None:
            self._response.close()
            self._response = None
