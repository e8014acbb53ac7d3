"""An agent that takes the bytes of uploads, and finds of every adapter that it is none."""

from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from workers.wire import LogTail, ReceivedFile, UploadState


def _refusal(status: int, code: str) -> JSONResponse:
    return JSONResponse({"error": {"message": "no", "code": code}}, status)


@dataclass
class AnsweringAgent:
    """`uploads`: upload id -> name -> the file, as far as it has come. It knows no other call."""

    uploads: dict[str, dict[str, ReceivedFile]] = field(default_factory=dict)

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/log", self.log),
                Route("/v1/admin/inspect_lora", self.install, methods=["POST"]),
                Route("/v1/uploads/{id}", self.state),
                Route("/v1/uploads/{id}", self.install, methods=["POST"]),
                Route("/v1/uploads/{id}", self.drop, methods=["DELETE"]),
                Route("/v1/uploads/{id}/{name}", self.begin, methods=["POST"]),
                Route("/v1/uploads/{id}/{name}", self.receive, methods=["PUT"]),
            ]
        )

    async def log(self, request: Request) -> Response:
        return Response(LogTail(lines=("ready",)).model_dump_json(), media_type="application/json")

    async def state(self, request: Request) -> Response:
        known = self.uploads.get(request.path_params["id"])
        return _refusal(404, "upload_unknown") if known is None else self._answer(request)

    async def begin(self, request: Request) -> Response:
        name, total = request.path_params["name"], (await request.json()).get("total_bytes")
        files = self.uploads.setdefault(request.path_params["id"], {})
        files[name] = ReceivedFile(name=name, received_bytes=0, total_bytes=total)
        return self._answer(request)

    async def receive(self, request: Request) -> Response:
        files, name = self.uploads[request.path_params["id"]], request.path_params["name"]
        came = files[name].received_bytes + len(await request.body())
        files[name] = files[name].model_copy(update={"received_bytes": came})
        return self._answer(request)

    async def install(self, request: Request) -> Response:
        return _refusal(422, "adapter_invalid")

    async def drop(self, request: Request) -> Response:
        self.uploads.pop(request.path_params["id"], None)
        return Response(status_code=204)

    def _answer(self, request: Request) -> Response:
        files = tuple(self.uploads[request.path_params["id"]].values())
        return Response(
            UploadState(upload_id=request.path_params["id"], files=files).model_dump_json(),
            media_type="application/json",
        )
