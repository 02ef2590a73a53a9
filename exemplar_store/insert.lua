-- requires place.lua
-- KEYS: exemplars, scores, stats, pins. ARGV: see `place`.
local new, bucket, gone = place(KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV)
return {new, bucket, gone}
