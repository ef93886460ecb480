from .decoding_stats import DecodingStats as DecodingStats
