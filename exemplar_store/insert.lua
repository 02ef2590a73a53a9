-- requires place.lua
-- KEYS: exemplars, scores, stats, pins. ARGV: filing, packed exemplar; see `place`.
local new, bucket, gone = place(KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[1], ARGV[2])
return {new, bucket, gone}
