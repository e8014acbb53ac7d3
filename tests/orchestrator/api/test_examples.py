"""The examples of the OpenAPI document."""


async def test_the_openapi_document_has_an_example_for_every_body_that_people_write(service):
    paths = (await service.http.get("/openapi.json")).json()["paths"]
    for path, method in (("/v1/adapters", "post"), ("/v1/aliases/{name}", "put"), ("/v1/policy", "put")):
        schema = paths[path][method]["requestBody"]["content"]["application/json"]["schema"]
        assert schema["examples"], path
