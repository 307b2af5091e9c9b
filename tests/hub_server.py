"""A Hugging Face Hub on loopback, in memory, as huggingface_hub 2.4 speaks to it without Xet."""

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

USERS = {"hf_test_token_alice": "alice"}
# What the Hub writes into the .gitattributes of a new repo, cut down to names met here.
LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".zip", ".png", ".onnx")
GIT_ATTRIBUTES = "".join(f"*{end} filter=lfs diff=lfs merge=lfs -text\n" for end in LFS_SUFFIXES)
BASE64_IN_JSON = re.compile(rb'"(?:content|sample)": ?"([A-Za-z0-9+/]*={0,2})')
# No YAML in the standard library: every top-level line of the front matter has a key.
FRONT_MATTER = re.compile(r"---\n(?:(?:[ #\-\]}].*|[^ #\-\]}\n].*:.*)?\n)*?---(?:\n|$)")
LICENSES = ("apache-2.0", "mit", "cc-by-4.0", "other")  # some of those that the Hub knows
NO_LOGIN = "Invalid username or password."
BAD_TOKEN = "Invalid credentials in Authorization header"


@dataclass(eq=False)
class Refusal(Exception):
    status: int
    message: str
    code: str = ""  # the client picks its exception by it
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    data: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        if self.lfs:
            return hashlib.sha256(self.data).hexdigest()
        return hashlib.sha1(b"blob %d\0%b" % (len(self.data), self.data)).hexdigest()


@dataclass(frozen=True)
class Commit:
    shas: tuple[str, ...]  # oldest first, its own last
    files: dict[str, Entry]
    message: str = ""


@dataclass
class Repo:
    repo_id: str
    owner: str
    private: bool
    gated: bool = False  # its files are for its owner only
    branches: dict[str, Commit] = field(default_factory=dict)
    fixed: dict[str, Commit] = field(default_factory=dict)  # by sha
    objects: dict[str, bytes] = field(default_factory=dict)  # LFS, by sha256

    def at(self, revision: str) -> Commit:
        found = self.branches.get(revision) or self.fixed.get(revision)
        if found is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found

    def commit(self, branch: str, files: dict[str, Entry], message: str) -> str:
        before = self.branches[branch].shas if branch in self.branches else ()
        tree = sorted((path, entry.oid) for path, entry in files.items())
        sha = hashlib.sha1(repr((self.repo_id, before, message, tree)).encode()).hexdigest()
        self.branches[branch] = self.fixed[sha] = Commit((*before, sha), files, message)
        return sha

    def apply(self, key: str, value: dict, files: dict[str, Entry]) -> None:
        path = value["path"]
        if key == "file":
            files[path] = Entry(base64.b64decode(value["content"], validate=True), lfs=False)
        elif key == "lfsFile":
            files[path] = Entry(self.objects[value["oid"]], lfs=True)
        else:
            del files[{"deletedFile": path}[key]]


def goes_to_lfs(path: str, size: int, sample: bytes) -> bool:
    return path.endswith(LFS_SUFFIXES) or size > 10 * 2**20 or b"\0" in sample


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one piece: no delayed acknowledgement in between
    server: "HubServer"

    def handle_call(self) -> None:
        hub, self.url = self.server, urlsplit(self.path)
        fault = hub.next_fault(self.command, self.path)
        if fault is not None and fault[2] is None:
            self.close_connection = True
            return
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.received.append((f"{self.command} {self.path}", self.body))
        try:
            if fault is not None:
                phrase = self.responses[fault[2]][0]
                raise Refusal(fault[2], BAD_TOKEN if fault[2] == 401 else phrase)
            self.route()
        except Refusal as refusal:
            code = {"X-Error-Code": refusal.code} if refusal.code else {}
            headers = {"X-Error-Message": refusal.message} | code | refusal.headers
            self.reply({"error": refusal.message}, refusal.status, headers)
        except (KeyError, TypeError, ValueError) as error:
            self.reply({"error": f"Malformed request: {error!r}"}, 400)

    do_GET = do_HEAD = do_POST = do_PUT = handle_call

    def route(self) -> None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.server.users:
            raise Refusal(401, BAD_TOKEN)
        self.user = self.server.users.get(token)
        if self.user is None and self.url.path in ("/api/whoami-v2", "/api/repos/create"):
            raise Refusal(401, NO_LOGIN)
        # Whatever can be fetched can be asked for by its headers alone.
        for method, pattern, function in ROUTES:
            match = re.fullmatch(pattern, self.url.path)
            if match is not None and method == self.command.replace("HEAD", "GET"):
                self.parts = {name: unquote(part) for name, part in match.groupdict("").items()}
                return function(self)
        raise Refusal(404, "Sorry, we can't find the page you are looking for.")

    def reply(self, value: object, status: int = 200, headers: dict | None = None) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.server.requests.append((self.command, self.url.path, status))
        self.send_response_only(status)  # the other one logs; tests read HubServer.requests
        length = {"Content-Length": str(len(body))}
        for name, text in ({"Content-Type": "application/json"} | length | (headers or {})).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def repo(self, *, write: bool = False) -> Repo:
        repo = self.server.repos.get(self.parts["repo_id"])
        owned = repo is not None and self.user == repo.owner
        if repo is None or (repo.private and not owned) or (write and self.user is None):
            # The Hub tells nobody whether a private repo exists. Its client reads a bare 401 from
            # an https address as "repository not found"; from http it needs the code.
            status, message = (404, "Repository not found") if self.user else (401, NO_LOGIN)
            raise Refusal(status, message, "RepoNotFound")
        if write and not owned:
            raise Refusal(403, "Authorization error.")
        return repo

    def whoami(self) -> None:
        self.reply({"type": "user", "name": self.user, "orgs": []})

    def validate_yaml(self) -> None:
        content = json.loads(self.body)["content"]
        broken = content.startswith("---") and FRONT_MATTER.match(content) is None
        errors = [{"message": "YAML metadata does not parse"}] if broken else []
        license = re.search(r"^license: (.*)$", content, re.MULTILINE)
        if license is not None and license[1] not in LICENSES:
            errors.append({"message": f'"license" must be one of [{", ".join(LICENSES)}]'})
        self.reply({"errors": errors, "warnings": []}, 400 if errors else 200)

    def create_repo(self) -> None:
        user, wanted = self.user, json.loads(self.body)
        repo_id = f"{wanted['organization'] or user}/{wanted['name']}"
        if not repo_id.startswith(f"{user}/"):
            raise Refusal(403, f"You don't have the rights to create a model under {repo_id}")
        url = f"{self.server.endpoint}/{repo_id}"
        if repo_id in self.server.repos:
            return self.reply({"error": "You already created this model repo", "url": url}, 409)
        files = {".gitattributes": GIT_ATTRIBUTES.encode()}
        private = wanted.get("visibility") == "private" or wanted.get("private")  # hub 1.5
        self.server.add_repo(repo_id, files, private=bool(private))
        self.reply({"url": url, "name": repo_id})

    def preupload(self) -> None:
        present, answers = self.repo(write=True).at(self.parts["revision"]).files, []
        for file in json.loads(self.body)["files"]:
            path = file["path"]
            lfs = goes_to_lfs(path, file["size"], base64.b64decode(file["sample"]))
            mode, oid = "lfs" if lfs else "regular", present[path].oid if path in present else None
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.reply({"files": answers})

    def lfs_batch(self) -> None:
        repo, objects = self.repo(write=True), json.loads(self.body)["objects"]
        base = f"{self.server.endpoint}/{repo.repo_id}.git/info/lfs/objects"
        for wanted in objects:
            if wanted["oid"] not in repo.objects:
                wanted["actions"] = {"upload": {"href": f"{base}/{wanted['oid']}"}}
        self.reply({"transfer": "basic", "objects": objects})

    def lfs_put(self) -> None:
        # The real address is signed for one object and carries no token.
        self.server.repos[self.parts["repo_id"]].objects[self.parts["oid"]] = self.body
        self.reply({})

    def commit(self) -> None:
        repo, branch = self.repo(write=True), self.parts["revision"]
        header, *operations = [json.loads(line) for line in self.body.splitlines()]
        parent = header["value"].get("parentCommit", "")
        with self.server.lock:
            if not repo.branches[branch].shas[-1].startswith(parent):
                raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            files = dict(repo.branches[branch].files)
            for operation in operations:
                repo.apply(operation["key"], operation["value"], files)
            sha = repo.commit(branch, files, header["value"]["summary"])
        url = f"{self.server.endpoint}/{repo.repo_id}/commit/{sha}"
        self.reply({"commitOid": sha, "commitUrl": url})

    def create_branch(self) -> None:
        repo, wanted = self.repo(write=True), json.loads(self.body)
        name = self.parts["revision"]
        if name in repo.branches:
            raise Refusal(409, f"Reference already exists: {name}")
        repo.branches[name] = repo.at(wanted.get("startingPoint", "main"))
        self.reply({})

    def info(self) -> None:
        repo = self.repo()
        commit = repo.at(self.parts["revision"] or "main")
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        answer = {"id": repo.repo_id, "sha": commit.shas[-1], "private": repo.private, "tags": []}
        self.reply(answer | {"gated": repo.gated and "manual", "siblings": siblings})

    def tree(self) -> None:
        """List the files of a folder, always those of its folders too."""
        commit = self.repo().at(self.parts["revision"])
        folder = self.parts["path"] and self.parts["path"] + "/"
        found = [
            {"type": "file", "path": path, "oid": entry.oid[:40], "size": len(entry.data)}
            for path, entry in commit.files.items()
            if path.startswith(folder)
        ]
        if folder and not found:
            raise Refusal(404, f"{folder} does not exist", "EntryNotFound")
        self.reply(found)

    def resolve(self) -> None:
        repo, path = self.repo(), self.parts["path"]
        if repo.gated and self.user != repo.owner:
            message = f"Access to model {repo.repo_id} is restricted. You must be authenticated."
            raise Refusal(403 if self.user else 401, message, "GatedRepo")
        commit = repo.at(self.parts["revision"])
        headers = {"X-Repo-Commit": commit.shas[-1]}
        if path not in commit.files:
            raise Refusal(404, "Entry not found", "EntryNotFound", headers)
        entry = commit.files[path]
        size, headers["ETag"] = len(entry.data), f'"{entry.oid}"'
        headers["Content-Type"] = "application/octet-stream"
        if entry.lfs:
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(size)}
        self.reply(entry.data, headers=headers)


REPO = r"/(?P<repo_id>[^/]+/[^/]+)"
API = f"/api/models{REPO}"
REVISION = r"/(?P<revision>[^/]+)"
ROUTES = (
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("POST", "/api/validate-yaml", Handler.validate_yaml),
    ("POST", "/api/repos/create", Handler.create_repo),
    ("POST", f"{API}/preupload{REVISION}", Handler.preupload),
    ("POST", rf"{REPO}\.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("PUT", rf"{REPO}\.git/info/lfs/objects/(?P<oid>[0-9a-f]{{64}})", Handler.lfs_put),
    ("POST", f"{API}/commit{REVISION}", Handler.commit),
    ("POST", f"{API}/branch{REVISION}", Handler.create_branch),
    ("GET", f"{API}(/revision{REVISION})?", Handler.info),
    ("GET", f"{API}/tree{REVISION}(/(?P<path>.+))?", Handler.tree),
    ("GET", f"{REPO}/resolve{REVISION}/(?P<path>.+)", Handler.resolve),
)


class HubServer(ThreadingHTTPServer):
    def __init__(self, users: Mapping[str, str] = USERS) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.users = dict(users)
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str, int]] = []  # method, path, status
        self.received: list[tuple[str, bytes]] = []
        self.faults: list[tuple[str, str, int | None]] = []  # without a status: hangs up
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def environment(self, home: Path) -> dict[str, str]:
        """All a client process needs, with the first user's token."""
        foreign = re.compile("(HF_|HUGGING|TRANSFORMERS_).*|.*_proxy", re.IGNORECASE)
        env = {key: text for key, text in os.environ.items() if not foreign.fullmatch(key)}
        env |= {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home)}
        env |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return env | {"HF_TOKEN": next(iter(self.users))}

    def add_repo(self, repo_id: str, files: dict[str, bytes], *, private: bool = False) -> str:
        repo = self.repos[repo_id] = Repo(repo_id, repo_id.split("/")[0], private)
        entries = {p: Entry(data, goes_to_lfs(p, len(data), data)) for p, data in files.items()}
        repo.objects |= {entry.oid: entry.data for entry in entries.values() if entry.lfs}
        return repo.commit("main", entries, "initial commit")

    def fail(
        self,
        method: str,
        path_part: str,
        *,
        status: int | None,
        times: int = 1,
    ) -> None:
        """Answer the next requests with an error, or with None hang up."""
        self.faults += [(method, path_part, status)] * times

    def next_fault(self, method: str, target: str) -> tuple[str, str, int | None] | None:
        with self.lock:
            for fault in self.faults:
                if fault[0] == method and fault[1] in target:
                    self.faults.remove(fault)
                    return fault
        return None

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        return {path: entry.data for path, entry in self.repos[repo_id].at(revision).files.items()}

    def commits(self, repo_id: str) -> list[str]:
        return list(self.repos[repo_id].at("main").shas)  # oldest first

    def everything(self) -> Iterator[tuple[str, bytes]]:
        """Every byte received, with where it came from; base64 is decoded, headers left out."""
        for label, body in list(self.received):
            yield label, body
            for encoded in BASE64_IN_JSON.findall(body):
                yield label, base64.b64decode(encoded[: len(encoded) // 4 * 4])
        for repo in list(self.repos.values()):
            for revision, commit in repo.fixed.items():
                for path, entry in commit.files.items():
                    yield f"{repo.repo_id} {path} at {revision}", entry.data
