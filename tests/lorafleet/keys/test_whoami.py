import yaml
from fastapi import FastAPI

from lorafleet.keys.auth import ApiKeys
from lorafleet.keys.key_files import hash_key
from lorafleet.keys.whoami import whoami_routes
from lorafleet.service.http import install_error_handlers
from tests.serving import client_of, serving


async def test_whoami_tells_any_valid_key_what_it_may_do_and_never_the_key(tmp_path):
    path = tmp_path / "keys.yaml"
    mine = {"sha256": hash_key("mine"), "tenant": "acme", "scopes": ["tenant-admin"], "limits": {"bytes_per_minute": 5}}
    metrics = {"sha256": hash_key("page"), "scopes": ["metrics"], "expires": "2999-01-01"}
    path.write_text(yaml.safe_dump({"keys": [mine, metrics]}))
    app = FastAPI()
    app.include_router(whoami_routes(ApiKeys([path])))
    install_error_handlers(app, RuntimeError)
    async with serving(app) as url, client_of(url) as client:

        async def who(key):
            return await client.get("/v1/whoami", headers={"authorization": f"Bearer {key}"})

        answer = await who("mine")
        found = answer.json()
        assert found["spec"]["tenant"] == "acme"
        assert found["spec"]["scopes"] == ["tenant-admin"]
        assert set(found["status"]["may"]) == {"infer", "view", "tenant-admin", "register"}
        assert found["status"]["is_confined_to_tenant"]
        assert found["spec"]["limits"] == {"bytes_per_minute": 5}
        assert found["spec"]["expires_at"] is None
        assert hash_key("mine") not in answer.text
        assert (await who("page")).json()["spec"]["expires_at"] == "2999-01-01T00:00:00Z"
        assert (await who("other")).status_code == 401
