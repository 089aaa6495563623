trl kto --config trl_kto.yaml --beta 0.2
