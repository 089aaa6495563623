"""`lockstep dashboard`: a local web server that shows runs, finished and in progress, and changes nothing in them.

`dashboard_server` answers requests, `run_catalogue` finds runs, `run_feed` follows the ledger of one run,
`event_stream` pushes news, and `static/` is the page."""
