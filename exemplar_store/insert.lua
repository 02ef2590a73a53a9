-- requires place.lua
-- KEYS: exemplars, scores, stats, pins, islands. ARGV: filing, packed exemplar; see `place`.
local new, bucket, gone = place(shelf_keys(1), ARGV[1], ARGV[2], '')
return {new, bucket, gone}
