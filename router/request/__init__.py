"""One inference request, from its first byte to its last.

The stages, in order, each once:

    read          InferenceRequestReader.read       the head and body as a ParsedRequest
    authenticate  InferenceHandler._authenticate    the caller, before the body is parsed
    resolve       RequestRun._resolve               base model and adapter
    authorise     resolve_target                    an adapter that the caller may not use is unknown to it
    tokenize      RequestRun._tokenize              token ids, or an approximation
    hash          stages.hash_prompt                block hashes of the prompt
    match         stages.match                      cached blocks of each replica
    decide        RequestRun._decide                the replica, at once or from the queue
    open          RequestRun._open                  the attempt, until its first event decides it
    relay         ClientResponse._relay             the answer to the client
    record        accounting.record                 load, quota, circuits, poison books, trace

The six classes of a request and their lives:

    HttpExchange       |=========================================|  one request on a client's connection
      ParsedRequest      |=======================================|  what the client asks for
      RequestRun         |=======================================|  drives the stages
        RoutingRequest       |===|                                  what the scheduler may know of it
          QueuedRequest        |=|                                  waits for an engine
          DispatchedRequest      |===============================|  counted at one replica, exactly once
            EngineAttempt          |=============================|  one HTTP exchange with one engine

An attempt that fails ends with its DispatchedRequest, and RequestRun begins with a RoutingRequest again, see
`router.core.failover.verdict`. Where a stage must wait, the request's coroutine leaves its batch for a task, see
`lorafleet.http_server.batches`.

May import every package but `items`, `api` and `app`.
"""
